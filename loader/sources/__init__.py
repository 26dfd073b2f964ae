"""Where versions come from. No source is believed: the trust core checks all that it hands out."""

from adapterd.loader.sources.folder import FolderSource
from adapterd.loader.sources.interface import Resolved, Source
from adapterd.loader.sources.registry import RegistrySource

__all__ = ["FolderSource", "RegistrySource", "Resolved", "Source"]
