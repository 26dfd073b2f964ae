"""Registering base models; a (id, revision) keeps its first module table for ever."""

from __future__ import annotations

import json

from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import Code, error
from adapterd.loader.identity import BasePin, canonical_json
from adapterd.registry.audit.service import AuditLog
from adapterd.registry.base_models.interfaces import BaseModelInfo
from adapterd.registry.base_models.models import BaseModelRow
from adapterd.registry.database import Clock, Database

MAX_ID_CHARS = 256


class BaseModelService:
    """Base models."""

    def __init__(self, db: Database, audit: AuditLog, clock: Clock) -> None:
        self._db = db
        self._audit = audit
        self._clock = clock

    def add(self, spec: BaseSpec, *, actor: str) -> BaseModelInfo:
        """Register a base model; the same one again changes nothing, but for a weights digest that was missing.

        Raises:
            Conflict: ALREADY_EXISTS when the id and revision are taken by another table or by other weights.
            Failed: BASE_TABLE_INVALID for an id that is too long to store.
        """
        if not 0 < len(spec.id) <= MAX_ID_CHARS:
            raise error(Code.BASE_TABLE_INVALID, "id", f"must have 1 to {MAX_ID_CHARS} characters")
        with self._db.write() as session:
            row = session.get(BaseModelRow, (spec.id, spec.revision), with_for_update=True)
            if row is None:
                row = _row(spec, self._clock)
                session.add(row)
                session.flush()
                self._note(session, spec, actor, "base.add")
            elif row.module_table_digest != spec.table_digest:
                raise error(
                    Code.ALREADY_EXISTS, f"{spec.id}@{spec.revision}",
                    f"is registered with the module table {row.module_table_digest}, not {spec.table_digest}",
                    "A revision pins the weights; another table means another model or another revision, or other "
                    "alternative tables: these are given when a base is registered.",
                )  # fmt: skip
            elif spec.weights_digest is not None and row.weights_digest is None:
                row.weights_digest = spec.weights_digest
                row.table_json = canonical_json(spec.as_json()).decode()
                self._note(session, spec, actor, "base.weights")
            elif spec.weights_digest not in (None, row.weights_digest):
                raise error(
                    Code.ALREADY_EXISTS, f"{spec.id}@{spec.revision}",
                    f"is registered with the weights digest {row.weights_digest}, not {spec.weights_digest}",
                    "These are other weights under the same revision: find out which ones the workers have.",
                )  # fmt: skip
            return _info(row)

    def _note(self, session: Session, spec: BaseSpec, actor: str, action: str) -> None:
        weights = {} if spec.weights_digest is None else {"weights_digest": spec.weights_digest}
        detail = {**spec.pin.as_json(), **weights}
        self._audit.append(session, tenant=None, actor=actor, action=action, target=spec.id, detail=detail)

    def get(self, model_id: str, revision: str) -> BaseSpec | None:
        """The base model, or None.

        Raises:
            Failed: BASE_TABLE_INVALID when the stored table is not the one that was registered.
        """
        if not (model_id + revision).isprintable():  # `BaseSpec` takes no other
            return None
        with self._db.read() as session:
            row = session.get(BaseModelRow, (model_id, revision))
        if row is None:
            return None
        spec = BaseSpec.from_json(json.loads(row.table_json))
        stored = BasePin(row.id, row.revision, row.module_table_digest), row.weights_digest
        if (spec.pin, spec.weights_digest) != stored:
            raise error(
                Code.BASE_TABLE_INVALID,
                f"{model_id}@{revision}",
                "the stored table is not the one registered",
            )
        return spec

    def list(self, *, after: tuple[str, str] = ("", ""), limit: int = 100) -> tuple[BaseModelInfo, ...]:
        """At most `limit` base models whose (id, revision) follows `after`, in that order."""
        key = tuple_(BaseModelRow.id, BaseModelRow.revision)
        query = select(BaseModelRow).where(key > after).order_by(BaseModelRow.id, BaseModelRow.revision)
        with self._db.read() as session:
            return tuple(_info(row) for row in session.scalars(query.limit(limit)))


def _row(spec: BaseSpec, clock: Clock) -> BaseModelRow:
    return BaseModelRow(
        id=spec.id, revision=spec.revision, module_table_digest=spec.table_digest,
        module_count=len(spec.modules), alternatives=[a.name for a in spec.alternatives],
        weights_digest=spec.weights_digest, table_json=canonical_json(spec.as_json()).decode(),
        created_at=clock(),
    )  # fmt: skip


def _info(row: BaseModelRow) -> BaseModelInfo:
    pin = BasePin(row.id, row.revision, row.module_table_digest)
    return BaseModelInfo(pin, row.module_count, row.created_at, tuple(row.alternatives), row.weights_digest)
