"""The card that kernels are timed on."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from adapterd.gpu_cache.engine.dispatch import DEPENDENT_LAUNCH_SINCE, LEAST_CAPABILITY
from adapterd.gpu_cache.engine.kernels.tuned import slug
from adapterd.loader.errors import Code, error


@dataclass(frozen=True, slots=True)
class Machine:
    """The card and what runs on it."""

    device: str
    name: str
    capability: tuple[int, int]
    torch: str
    triton: str

    @property
    def pdl(self) -> bool:
        return self.capability >= DEPENDENT_LAUNCH_SINCE

    @property
    def target(self) -> int:
        """As compilers say it: 90 for 9.0."""
        return 10 * self.capability[0] + self.capability[1]

    def as_json(self) -> dict[str, object]:
        return {"card": self.name, "table": f"{slug(self.name)}.json", "torch": self.torch, "triton": self.triton}


def machine_at(device: str) -> Machine:
    """Raises Unavailable (DEVICE_ERROR) where there is no such card, or none that the kernels run on."""
    if not device.startswith("cuda"):
        raise _no_card(device, "kernels are timed on a CUDA card only", "Name one: --device cuda:0.")
    try:
        if not torch.cuda.is_available():
            raise _no_card(device, "this machine has no CUDA card that torch can use", "Run it where the engine runs.")
        capability = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
    except (RuntimeError, AssertionError, ValueError) as fault:
        raise _no_card(device, str(fault).splitlines()[0], "`nvidia-smi -L` lists the cards.") from None
    if capability < LEAST_CAPABILITY:
        raise _no_card(device, f"{name} is of compute capability {capability}, too old for the kernels", "")
    if find_spec("triton") is None:
        raise _no_card(device, "Triton is not installed", "Install adapterd with the `worker` extra.")
    import triton

    return Machine(device, name, capability, torch.__version__, triton.__version__)


def _no_card(device: str, message: str, hint: str) -> Exception:
    return error(Code.DEVICE_ERROR, device, message, hint)
