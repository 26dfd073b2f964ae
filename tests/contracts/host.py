"""What every `Host` must do, over a loader in memory whose calls can be stopped, and with real threads."""

from __future__ import annotations

from contracts.host_ends import HostEnds
from contracts.host_finding import HostFinding
from contracts.host_memory import HostMemory


class HostContract(HostFinding, HostMemory, HostEnds):
    """All of it. Subclasses give `make`."""
