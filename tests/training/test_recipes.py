"""Freezing, clipping apart and the coefficient; DDP with and without the loss."""

import pytest
import torch
import torch.distributed

from indexer_ops.modules import LightningIndexer
from indexer_ops.training import (
    CoefficientSchedule,
    attach_aux_loss,
    clip_indexer_apart,
    freeze_all_but_indexer,
    indexer_param_group,
    split_indexer_parameters,
    zero_loss,
)
from processes import run_on_ranks


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = torch.nn.Linear(3, 3)
        self.indexer = torch.nn.Linear(3, 2)

    def forward(self, x, coefficient):
        if coefficient == 0:
            loss, scale = zero_loss(self.indexer.parameters()), 1.0
        else:
            loss, scale = self.indexer(x.detach()).square().mean(), coefficient
        return attach_aux_loss(self.trunk(x), loss, scale)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.indexer_norm = torch.nn.Linear(3, 3)  # its name only begins like an indexer's

    def forward(self, x, coefficient):
        for block in self.blocks:
            x = block(x, coefficient)
        return self.indexer_norm(x)


@pytest.fixture
def model():
    return Model()


def names_of(model, parameters):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for parameter in parameters}


INDEXER_NAMES = {f"blocks.{i}.indexer.{kind}" for i in range(2) for kind in ("weight", "bias")}


def test_split(model):
    others, indexers = split_indexer_parameters(model)
    assert names_of(model, indexers) == INDEXER_NAMES
    assert len(others) + len(indexers) == len(list(model.parameters()))
    with pytest.raises(ValueError, match="^model must have an indexer"):
        split_indexer_parameters(torch.nn.Linear(2, 2))


def test_the_package_s_own_indexer_is_found_under_any_name():
    own = LightningIndexer.__new__(LightningIndexer)
    torch.nn.Module.__init__(own)
    own.weight = torch.nn.Parameter(torch.ones(2))
    model = torch.nn.ModuleDict({"selector": own, "trunk": torch.nn.Linear(2, 2)})
    assert names_of(model, split_indexer_parameters(model)[1]) == {"selector.weight"}


def test_freezing_and_back(model):
    model.blocks[0].trunk.bias.requires_grad_(False)
    model(torch.ones(1, 3), 1.0).sum().backward()
    with freeze_all_but_indexer(model) as frozen:
        assert {name for name, p in model.named_parameters() if p.requires_grad} == INDEXER_NAMES
        assert {name for name, p in model.named_parameters() if p.grad is not None} == INDEXER_NAMES
        model.zero_grad()
        model(torch.ones(1, 3), 1.0).sum().backward()
        assert {name for name, p in model.named_parameters() if p.grad is not None} == INDEXER_NAMES
    frozen.restore()
    thawed = {name for name, p in model.named_parameters() if p.requires_grad}
    assert thawed == {name for name, _ in model.named_parameters()} - {"blocks.0.trunk.bias"}


def test_parameter_group(model):
    model.blocks[0].indexer.bias.requires_grad_(False)
    group = indexer_param_group(model, lr=0.5)
    assert group["lr"] == 0.5
    assert names_of(model, group["params"]) == INDEXER_NAMES - {"blocks.0.indexer.bias"}
    torch.optim.SGD([group], lr=1.0)


def test_clipping_apart_leaves_the_model_s_gradients(model):
    others, indexers = split_indexer_parameters(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    for parameter in indexers:
        parameter.grad.fill_(10.0)
    model_norm, indexer_norm = clip_indexer_apart(model, max_norm=1.0, indexer_max_norm=2.0)
    assert model_norm < 1 < indexer_norm
    assert all(torch.equal(p.grad, torch.full_like(p, 1e-3)) for p in others)
    assert torch.cat([p.grad.flatten() for p in indexers]).norm().item() == pytest.approx(2.0, rel=1e-4)
    for norms, name in (((0.0, 1.0), "max_norm"), ((1.0, float("nan")), "indexer_max_norm")):
        with pytest.raises(ValueError, match=f"^{name} must"):
            clip_indexer_apart(model, *norms)


def test_coefficient():
    assert CoefficientSchedule().at(0) == CoefficientSchedule().at(10**6) == 1e-2
    assert [CoefficientSchedule(0.4, warm_up_steps=3).at(step) for step in range(5)] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.4]
    )
    assert CoefficientSchedule.off().at(5) == 0
    for name, options in (
        ("coefficient", {"coefficient": -1e-3}),
        ("coefficient", {"coefficient": float("nan")}),
        ("coefficient", {"coefficient": float("inf")}),
        ("warm_up_steps", {"warm_up_steps": -1}),
    ):
        with pytest.raises(ValueError, match=f"^{name} must"):
            CoefficientSchedule(**options)
    with pytest.raises(ValueError, match="^step must"):
        CoefficientSchedule().at(-1)


def train_in_ddp(rank, world_size, coefficient, directory):
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(f"{directory}/store", world_size),
        rank=rank,
        world_size=world_size,
    )
    model = Model()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(2):  # the second forward pass raises if a parameter got no gradient in the first
        model.zero_grad()
        parallel(torch.full((2, 3), float(rank + 1)), coefficient).sum().backward()
    torch.save({name: p.grad for name, p in model.named_parameters()}, f"{directory}/{rank}.pt")
    del parallel
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("coefficient", [0.0, 1e-2])
def test_ddp(coefficient, tmp_path):
    run_on_ranks(train_in_ddp, 2, coefficient, str(tmp_path))
    of_ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    model = Model()
    for rank in range(2):
        (model(torch.full((2, 3), float(rank + 1)), coefficient).sum()).backward()
    for name, parameter in model.named_parameters():
        for gradients in of_ranks:
            torch.testing.assert_close(gradients[name], parameter.grad / 2)
        if name in INDEXER_NAMES:
            assert parameter.grad.any().item() == (coefficient > 0), name
