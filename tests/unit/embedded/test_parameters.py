"""What a module tree is fed with, and what rebinding reaches."""

from __future__ import annotations

import torch
from torch import nn

from engine_adapter.parameters import collect


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.table.weight
        self.twin = nn.Linear(2, 3, bias=False)
        self.twin.weight = nn.Parameter(self.table.weight.data)  # the same storage, another object
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("angles", torch.ones(2), persistent=False)
        self.nothing = nn.Parameter(torch.empty(0))
        self.nothing_too = nn.Parameter(torch.empty(0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.table(ids) * self.scale
        return torch.cat((self.head(hidden), self.twin(hidden)))


def test_ties_are_one_parameter_and_computed_tables_none() -> None:
    found = collect(Small())
    aliases = {name: parameter.aliases for name, parameter in found.items()}
    assert aliases == {
        "table.weight": ("head.weight", "twin.weight"),
        "nothing": (),
        "nothing_too": (),
        "scale": (),
    }
    assert found.keys() - collect(Small(), empty=False).keys() == {"nothing", "nothing_too"}


def test_rebinding_reaches_every_reader_of_a_tie_and_buffers_too() -> None:
    model, ids = Small().eval(), torch.tensor([0, 2])
    found = collect(model)
    weight, scale = torch.randn(3, 2), torch.randn(2)
    found["table.weight"].rebind(weight)
    found["scale"].rebind(scale)
    with torch.no_grad():
        hidden = weight[ids] * scale
        assert torch.equal(model(ids), torch.cat((hidden @ weight.T, hidden @ weight.T)))
        weight.zero_()  # shared, not copied
        assert torch.count_nonzero(model(ids)) == 0
