"""Members that join, come back, leave and fail while the weights of the fleet are replaced."""

import asyncio

import pytest
import torch
from fleet_engines import MemberEngine, states, until
from safetensors.torch import save_file

from rollouts.engines.fleet import EngineFleet, FleetLimits
from rollouts.engines.weight_deltas import write_weight_delta
from rollouts.errors import ServerUnreachableError, WeightUpdateError


class UpdatableMember(MemberEngine):
    """Takes new weights once `may_load` is set, and raises `refusals` in order before that."""

    def __init__(self, version="0"):
        super().__init__(version)
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.loading = asyncio.Event()
        self.refusals = []
        self.health_gate = asyncio.Event()
        self.health_gate.set()
        self.updates = []

    async def health(self):
        healthy = await super().health()
        await self.health_gate.wait()
        return healthy

    async def update_weights(self, weights, version, *, in_flight="abort"):
        self.updates.append(version)
        self.loading.set()
        await self.may_load.wait()
        if self.refusals:
            raise self.refusals.pop(0)
        self.weight_version = version


async def fleet_of(*names, **limits):
    engines = {name: UpdatableMember() for name in names}
    fleet = EngineFleet(engines, limits=FleetLimits(**{"check_seconds": 0.01, "wait_seconds": 5.0, **limits}))
    await fleet.check()
    return engines, fleet


async def test_a_member_that_comes_back_during_an_update_does_not_serve_the_old_weights_after_it():
    engines, fleet = await fleet_of("a", "b", eject_after=1)
    async with fleet:
        engines["b"].is_healthy = False
        await fleet.check()
        assert states(fleet) == {"a": "ready", "b": "ejected"}
        engines["a"].may_load.clear()
        update = asyncio.create_task(fleet.update_weights(["tensors"], "1"))
        await engines["a"].loading.wait()
        engines["b"].is_healthy = True
        await fleet.check()
        engines["a"].may_load.set()
        await update
        await fleet.check()
        assert states(fleet) == {"a": "ready", "b": "ejected"}


async def test_an_update_leaves_a_drained_member_drained():
    engines, fleet = await fleet_of("a", "b")
    async with fleet:
        await fleet.drain("b")
        await fleet.control.update_weights("directory", "1")
        assert states(fleet) == {"a": "ready", "b": "draining"}
        await fleet.undrain("b")
        await until(lambda: engines["b"].weight_version == "1")


@pytest.mark.slow
async def test_a_member_that_failed_to_load_the_weights_of_the_fleet_tries_again():
    engines, fleet = await fleet_of("a", "b")
    async with fleet:
        engines["b"].refusals = [WeightUpdateError("killed"), WeightUpdateError("killed while it caught up")]
        await fleet.update_weights("directory", "1")
        for _ in range(200):
            await fleet.check()
            await asyncio.sleep(0.005)
        assert states(fleet) == {"a": "ready", "b": "ready"}
        assert engines["b"].weight_version == "1"


async def test_a_member_that_was_restarted_while_it_served_loads_the_weights_before_its_next_request():
    engines, fleet = await fleet_of("a", "b", eject_after=5)
    async with fleet:
        await fleet.update_weights("directory", "1")
        engines["b"].weight_version = "0"  # it was started again, between two checks
        await fleet.check()
        assert states(fleet)["b"] == "ejected"
        await until(lambda: engines["b"].weight_version == "1")
        await fleet.check()
        assert states(fleet)["b"] == "ready"


async def test_a_member_that_lacks_the_base_of_a_delta_loads_all_that_is_before_it(tmp_path):
    (tmp_path / "0").mkdir()
    save_file({"layer.weight": torch.zeros(8)}, tmp_path / "0" / "model.safetensors")
    for version in (1, 2):
        weights = {"layer.weight": torch.full((8,), float(version))}
        base = tmp_path / str(version - 1)
        write_weight_delta(weights, tmp_path / str(version), base=base.name, base_directory=base)
    engines, fleet = await fleet_of("a", "b", eject_after=5)
    async with fleet:
        await fleet.update_weights(tmp_path / "1", "1")
        await fleet.update_weights(tmp_path / "2", "2")
        engines["b"].weight_version = "default"  # it was started again
        await fleet.check()
        await until(lambda: engines["b"].weight_version == "2")
        assert engines["b"].updates == ["1", "2", "0", "2"]
        assert engines["a"].updates == ["1", "2"]


class EndlessUpdate(UpdatableMember):
    """An update ends only with the answer of the server, as that of `VLLMEngine` does, also when it is cancelled."""

    async def update_weights(self, weights, version, *, in_flight="abort"):
        task = asyncio.ensure_future(super().update_weights(weights, version))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise


async def test_an_update_goes_on_without_a_member_that_its_checks_eject():
    hanging = EndlessUpdate()
    hanging.may_load.clear()
    engines = {"a": UpdatableMember(), "b": hanging}
    async with EngineFleet(engines, limits=FleetLimits(check_seconds=0.01)) as fleet:
        await fleet.check()
        update = asyncio.create_task(fleet.control.update_weights("directory", "1"))
        await hanging.loading.wait()
        hanging.is_healthy = False
        results = await update
        assert isinstance(results["b"], ServerUnreachableError)
        assert "its health check failed" in str(results["b"])
        assert states(fleet) == {"a": "ready", "b": "ejected"}
        hanging.may_load.set()


async def test_a_check_that_began_before_a_member_failed_an_update_does_not_admit_it_again():
    engines, fleet = await fleet_of("a", "b", check_seconds=600.0)
    async with fleet:
        engines["b"].refusals = [WeightUpdateError("refused")]
        engines["b"].health_gate.clear()
        check = asyncio.create_task(fleet.check())
        await until(lambda: engines["b"].health_checks == 2)
        await fleet.update_weights("directory", "1")
        engines["b"].health_gate.set()
        await check
        assert states(fleet) == {"a": "ready", "b": "ejected"}
