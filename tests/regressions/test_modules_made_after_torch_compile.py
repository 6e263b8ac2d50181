"""torch.compile patches how modules are made, for the whole process; a function that makes one is captured all the same."""

import subprocess
import sys

PROGRAM = """
import torch, dynamotor
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))

def fn(x, y):
    return torch.nn.CrossEntropyLoss()(x, y)

x, y = torch.randn(4, 5), torch.tensor([0, 1, 2, 3])
patched = torch.nn.Module.__init__.__name__
assert dynamotor.compile(fn, backend="eager", fullgraph=True)(x, y).equal(fn(x, y))
print(patched)
"""


def test_a_function_that_makes_a_module_is_captured_behind_torch_compile():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "patched_init"  # or the case tests nothing
