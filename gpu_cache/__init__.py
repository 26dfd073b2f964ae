"""From verified bytes to resident adapters: pages, fences, leases, budgets, eviction, copies."""

from .budgets import TenantBudget
from .cache import AdapterCache
from .config import CacheConfig
from .device import Device, open_device
from .leases import Lease
from .records import LeaseState, Place
from .slots import Resident
from .statistics import CacheStatistics
from .tickets import StepTicket

__all__ = [
    "AdapterCache", "CacheConfig", "CacheStatistics", "Device", "Lease", "LeaseState", "Place", "Resident",
    "StepTicket", "TenantBudget", "open_device",
]  # fmt: skip
