"""Fifty steps of tiny models: losses, parameters, buffers, optimizer state and ties are the CPU's, in each
way to train on xla.
"""

import copy

import pytest
import torch

pytest.importorskip("jax", reason="jax is not installed")

import dynamotor  # noqa: E402
from dynamotor.xla.core import xla_model as xm  # noqa: E402
from dynamotor.xla.step import compile_step  # noqa: E402
from dynamotor.xla.sync import sync  # noqa: E402

STEPS = 50


class Bert(torch.nn.Module):
    """One layer with tied embeddings."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.layer = torch.nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.0, batch_first=True, activation="gelu"
        )
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.layer(self.embedding(ids))).flatten(0, 1)


class ResNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm1 = torch.nn.Conv2d(3, 4, 3, padding=1, bias=False), torch.nn.BatchNorm2d(4)
        self.conv, self.norm2 = torch.nn.Conv2d(4, 4, 3, padding=1, bias=False), torch.nn.BatchNorm2d(4)
        self.head = torch.nn.Linear(4, 5)

    def forward(self, x):
        x = self.norm1(self.stem(x)).relu()
        x = (x + self.norm2(self.conv(x))).relu()
        return self.head(x.mean((2, 3)))


class Lstm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = torch.nn.LSTM(3, 6, num_layers=2, batch_first=True), torch.nn.Linear(6, 5)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


MODELS = {
    "bert": (
        Bert,
        torch.optim.AdamW,
        {"lr": 1e-2},
        lambda: (ids := torch.randint(0, 11, (4, 5)), (ids + 1).flatten() % 11),
    ),
    "resnet": (
        ResNet,
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9},
        lambda: (torch.randn(4, 3, 6, 6, dtype=torch.float64), torch.randint(0, 5, (4,))),
    ),
    "lstm": (
        Lstm,
        torch.optim.RMSprop,
        {"lr": 1e-2, "momentum": 0.5},
        lambda: (torch.randn(4, 6, 3, dtype=torch.float64), torch.randint(0, 5, (4,))),
    ),
}
loss_of = torch.nn.functional.cross_entropy


def train(model, optimizer, batches, way):
    """The losses; everything in float64, so that only a wrong state can differ."""
    if way == "compile_step":
        step = compile_step(model, loss_of, optimizer)
        return [step(x, y).item() for x, y in batches]
    run = dynamotor.compile(model, backend="xla") if way == "bridge" else model
    losses = []
    for x, y in batches:
        loss = loss_of(run(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if way != "cpu":
            sync()
        losses.append(loss.item())
    return losses


QUICK = {("bert", "bridge"), ("resnet", "compile_step"), ("lstm", "lazy")}
CASES = [
    pytest.param(name, way, marks=() if (name, way) in QUICK else pytest.mark.slow)
    for name in MODELS
    for way in ("lazy", "bridge", "compile_step")
]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name, way", CASES)
@pytest.mark.slow
def test_fifty_steps_leave_the_cpus_state(name, way):
    make, optimizer_of, settings, batch = MODELS[name]
    torch.manual_seed(0)
    expected = make().double()
    model = copy.deepcopy(expected)
    kept = dict(model.named_parameters(remove_duplicate=False))
    mine = optimizer_of(model.parameters(), **settings)  # made before the model moves
    model.to("xla")
    assert all(p is kept[n] for n, p in model.named_parameters(remove_duplicate=False))
    batches = [batch() for _ in range(STEPS)]
    reference = optimizer_of(expected.parameters(), **settings)
    losses = train(expected, reference, batches, "cpu")
    found = train(model, mine, [tuple(t.to("xla") for t in pair) for pair in batches], way)
    assert found == pytest.approx(losses, rel=1e-6)
    close = {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(
        {k: v.cpu() for k, v in model.state_dict().items()}, dict(expected.state_dict()), **close
    )
    for state, other in zip(mine.state.values(), reference.state.values(), strict=True):
        assert state.keys() == other.keys()
        for key, value in other.items():
            torch.testing.assert_close(torch.as_tensor(state[key]).cpu(), torch.as_tensor(value), **close)
    if name == "bert":
        assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("way", ["bridge", "compile_step"])
def test_fifty_steps_with_dropout_draw_what_lazy_ones_draw(way):
    def run(way):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 5), torch.nn.Dropout(0.1)
        )
        optimizer = torch.optim.SGD(model.double().to("xla").parameters(), lr=0.1)
        batches = [
            (torch.randn(4, 4, dtype=torch.float64).to("xla"), torch.randint(0, 5, (4,)).to("xla"))
            for _ in range(STEPS)
        ]
        xm.set_rng_state(3)
        return (
            train(model, optimizer, batches, way),
            xm.get_rng_state(),
            [p.detach().cpu() for p in model.parameters()],
        )

    losses, state, parameters = run(way)
    expected_losses, expected_state, expected = run("lazy")
    assert losses == pytest.approx(expected_losses, rel=1e-6) and state == expected_state
    torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=1e-7)
