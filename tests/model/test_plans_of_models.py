"""Models that are to be open together are planned with the devices' memory divided among them."""

from __future__ import annotations

from resolved import config_of

from specoffload.config.options import PlanOptions
from specoffload.config.resolution import demo_file
from specoffload.opening.context_size import planned_with_context
from specoffload.server.router.planning import limited, plan_all
from specoffload.server.router.sharing import share

SIZES = (16 << 20, 12 << 20)


def test_two_models_on_two_devices_get_a_part_of_each() -> None:
    given = {"device": "sim,sim", "vram_bytes": SIZES, "ctx_size": 512}
    models = {"large": "target.gguf", "small": "draft.gguf"}
    configs = {name: config_of(model=demo_file(file), **given) for name, file in models.items()}
    planned = plan_all(configs)
    assert planned.reasons == ()
    sharing = share(planned.needs, planned.room, 2, devices=planned.devices)
    assert sharing.fits(["large", "small"])
    used = [0] * len(SIZES)
    for name, config in configs.items():
        got = sharing.share_of(name)
        assert got is not None
        for i, n_bytes in enumerate(got.each_device_bytes):
            used[i] += n_bytes
        its = planned_with_context(limited(config, got.each_device_bytes), PlanOptions())
        for part, most in zip(its.parts or (its,), got.each_device_bytes, strict=True):
            assert part.plan.used_bytes <= most
    assert all(n_bytes <= size for n_bytes, size in zip(used, SIZES, strict=True))
