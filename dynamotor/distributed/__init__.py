"""Data-parallel training: gradients are reduced inside the compiled backward, or the graph is cut at DDP's
buckets; sharded parameters are gathered inside the compiled graphs.

## Contract 6: data-parallel training (`distributed/`)

* `data_parallel.data_parallel(backend, options) -> backend` stands around every backend (`api.compile`). A
  training graph becomes `DdpVariants`: plain (outside of DDP, and under `no_sync`) and one more form for each
  DDP module whose forward is running (`DistributedDataParallel._active_ddp_module`). `compile(DDP(model))`
  compiles the module inside; DDP's own forward stays Python.
* `Averager` (one a DDP module) holds the decision. All ranks settle it through the group's store before a
  gradient moves (`agreement.py`): one `BucketPlan` of buckets (equal digests) or, when any rank gives a
  `Reason`, DDP's own reducer with the graph cut into stages (`split.py`).
* A plan fixes what goes over the wire in each synchronised backward: its buckets in order, once, averaged,
  each gradient with the parameter's own from `no_sync` steps. A rank fulfils it inside its compiled
  backward (`insert_reductions.py` puts `dynamotor::bucket_start` nodes into the aten graph, each takes the
  one before as an argument, and `bucket_wait` nodes that give the averages: at the end, or in a whole step
  before the updates) or, where it cannot (`reduce_after_backward`: another graph, an eager call, hooks,
  gradients from outside), right after the backward. Other ranks cannot tell, so ranks may compile different
  graphs at different times. What all ranks see alike decides the rest: after several forwards, or with
  several DDP modules in one backward, all reduce at its end, module by module in the order in which they were
  settled.
* `rank_failures.py`: autograd's engine object is replaced by one that gives failures between ranks a code
  (DM703 to DM705) and the user's line, because DDP's reducer fails below anything of ours.
* DDP's reducer is idle for such a step: `_post_forward` runs with a stand-in for it. Buffers, `join`,
  `no_sync` and state stay DDP's.
* Gradients are slots of the bucket's memory, in the parameters' strides; the memory returns to a pool when
  no reference to the gradients exists.
* `collectives.py`: calls of `torch.distributed._functional_collectives` are captured as a start and a wait.
  Collectives are never merged, dropped or reordered (`graph.op_facts.is_collective`); waits move down to the
  first use, starts of a backward up to their inputs. In native aten graphs (tensor parallel ones among them)
  `beside.py` puts products between a start and its wait; `rank_order.py` leaves gathered rows in the order of
  ranks.
* `fully_shard`: `shard_capture.py` puts nodes in the place of FSDP2's hooks (`shard_ops.py`), or leaves the
  hooks to PyTorch with a reason (DM460). `shard_group.py` runs them, with the hooks' messages;
  `prefetch.py` moves gathers up. Gathered weights are computed again in the backward unless
  `reshard_after_forward=False`; `.grad` of the shards is complete when the backward ends.
"""
