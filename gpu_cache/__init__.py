"""From verified bytes to resident adapters: pages, fences, leases, budgets, eviction, copies."""

from adapterd.gpu_cache.budgets import TenantBudget
from adapterd.gpu_cache.cache import AdapterCache
from adapterd.gpu_cache.config import CacheConfig
from adapterd.gpu_cache.device import Device, open_device
from adapterd.gpu_cache.events import EventFollower, EventSource
from adapterd.gpu_cache.leases import Lease
from adapterd.gpu_cache.pins import Pin
from adapterd.gpu_cache.records import LeaseState, Place
from adapterd.gpu_cache.residency import Residence
from adapterd.gpu_cache.revocation import Revocation
from adapterd.gpu_cache.routes import Route
from adapterd.gpu_cache.slots import Resident
from adapterd.gpu_cache.statistics import CacheStatistics
from adapterd.gpu_cache.tickets import StepTicket

__all__ = [
    "AdapterCache", "CacheConfig", "CacheStatistics", "Device", "EventFollower", "EventSource", "Lease", "LeaseState",
    "Pin", "Place", "Residence", "Resident", "Revocation", "Route", "StepTicket", "TenantBudget", "open_device",
]  # fmt: skip
