"""transformers' Trainer, which asks accelerate for the device, under torch_xla's name: its losses are those of
a plain loop on the CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

for module in ("jax", "transformers", "accelerate"):
    pytest.importorskip(module, reason=f"{module} is not installed")

from children import run_forked  # noqa: E402

PROGRAM = """
    import sys
    import dynamotor.xla
    dynamotor.xla.install_as_torch_xla()
    from bench import torchvision_stub
    torchvision_stub.prepare()
    import torch_xla.runtime as xr
    folder, divided = sys.argv[1], sys.argv[2] == "divided"
    if divided:
        xr.use_spmd()
    import copy
    import torch
    from accelerate.utils import extract_model_from_parallel
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    assert torch.device("xla", 0) == TrainingArguments(folder).device

    class Fully(Trainer):
        # transformers 5.23 makes no optimizer for a model that XLA's FSDP wraps
        def _wrap_model(self, model, training=True, **options):
            wrapped = super()._wrap_model(model, training, **options)
            if self.optimizer is None and training:
                self.create_optimizer(wrapped)
            return wrapped

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, intermediate_size=32, max_position_embeddings=16)
    model = LlamaForCausalLM(config)
    plain = copy.deepcopy(model)
    tokens = torch.randint(16, (8, 12))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    more = {"fsdp": "full_shard", "fsdp_config": {
        "xla": True, "xla_fsdp_v2": True, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=8, per_device_eval_batch_size=8, num_train_epochs=4,
        logging_steps=1,
        learning_rate=1e-2, lr_scheduler_type="constant", max_grad_norm=0.0, report_to=[], disable_tqdm=True,
        save_strategy="no", optim="adamw_torch", **(more if divided else {}))
    trainer = Fully(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    losses.append(trainer.evaluate()["eval_loss"])
    assert {p.device.type for p in trainer.model.parameters()} == {"xla"}

    optimizer, expected = torch.optim.AdamW(plain.parameters(), 1e-2, weight_decay=0.0), []
    for step in range(5):
        loss = plain(input_ids=tokens, labels=tokens).loss
        expected.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    extract_model_from_parallel(trainer.model, recursive=True).save_pretrained(folder)
    again = LlamaForCausalLM.from_pretrained(folder)
    loss = again(input_ids=tokens, labels=tokens).loss.item()
    assert abs(loss - expected[-1]) < 1e-5, (loss, expected)
    print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lazy", "divided"])
def test_a_trainer_trains_evaluates_and_saves_as_the_cpu_does(kind: str, tmp_path: Path) -> None:
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"} if kind == "divided" else {}
    done = run_forked(PROGRAM, str(tmp_path), kind, **devices)
    assert "done" in done.stdout, done.stdout + done.stderr
