"""The prefix cache: equal outputs are shared, nothing else is."""

from __future__ import annotations

import shutil
from pathlib import Path

from adapterd.cli.worker.prefix import BLOCK_TOKENS, PrefixCache
from adapterd.cli.worker.requests import Wish
from fakes.worker_world import ALL, WorkerWorld

PROMPT = [(5 * i) % 251 for i in range(3 * BLOCK_TOKENS + 4)]
WHOLE = 3 * BLOCK_TOKENS


def taken(world: WorkerWorld, wish: Wish, **more: object) -> tuple[int, list[int]]:
    """Tokens that a request took from the prefix cache, and what it answered."""
    before = world.prefix.hits
    answer = world.answer(wish, PROMPT, **more)
    return world.prefix.hits - before, answer


def test_the_same_adapter_shares_and_answers_the_same(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, prefix=PrefixCache(64)) as world:
        package = world.publisher.publish("acme", "finance", modules=ALL, rank=4, alpha=8, seed=1)
        cold, first = taken(world, "acme/finance")
        warm, second = taken(world, "acme/finance")
        assert (cold, warm) == (0, WHOLE) and first == second
        world.check_greedy(PROMPT, second, [(package, 2.0, 1.0)])
        assert taken(world, None)[0] == 0
        assert taken(world, None)[0] == WHOLE


def test_two_versions_of_one_adapter_never_share(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, prefix=PrefixCache(64)) as world:
        publish = world.publisher.publish
        publish("acme", "finance", modules=ALL, rank=4, alpha=8, seed=1)
        taken(world, "acme/finance")
        newer = publish("acme", "finance", 2, modules=ALL, rank=4, alpha=8, seed=2)
        hits, answer = taken(world, "acme/finance")
        assert hits == 0
        world.check_greedy(PROMPT, answer, [(newer, 2.0, 1.0)])


def test_two_tenants_with_equal_digests_never_share(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, prefix=PrefixCache(64)) as world:
        for tenant in ("acme", "globex"):
            world.publisher.publish(tenant, "finance", modules=ALL, rank=4, alpha=8, seed=1)
        assert taken(world, "acme/finance")[0] == 0
        assert taken(world, "globex/finance")[0] == 0
        digests = {world.ended(name).applied[0][0] for name in world.events}
        assert len(digests) == 1
        assert taken(world, None)[0] == taken(world, None, tenant="globex")[0] == 0


def test_two_compositions_never_share_and_equal_ones_do(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, prefix=PrefixCache(256)) as world:
        for seed, name in enumerate(("finance", "legal"), 1):
            world.publisher.publish("acme", name, modules=ALL, rank=4, alpha=8, seed=seed)
        mixes: list[Wish] = [
            "acme/finance",
            (("acme/finance", 0.5),),
            (("acme/finance", 0.5), ("acme/legal", 0.5)),
            (("acme/finance", 0.5), ("acme/legal", 0.25)),
        ]
        assert [taken(world, mix)[0] for mix in mixes] == [0, 0, 0, 0]
        assert taken(world, (("acme/legal", 0.25), ("acme/finance", 0.5)))[0] == WHOLE  # order does not matter
        assert taken(world, (("acme/finance", 1.0),))[0] == WHOLE


def test_only_whole_blocks_of_an_equal_beginning_are_taken(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, prefix=PrefixCache(64)) as world:
        world.answer(None, PROMPT)
        for prompt, hits in (
            (PROMPT[: 2 * BLOCK_TOKENS], BLOCK_TOKENS),  # the last token is always computed
            ([*PROMPT[: BLOCK_TOKENS + 3], 250, *PROMPT], BLOCK_TOKENS),
            ([250, *PROMPT[1:]], 0),
        ):
            before = world.prefix.hits
            world.check_greedy(prompt, world.answer(None, prompt), ())
            assert world.prefix.hits - before == hits


def test_it_keeps_no_more_than_it_may_and_forgets_ends_first(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, prefix=PrefixCache(2)) as world:
        world.answer(None, PROMPT)
        assert world.prefix.blocks == 2
        assert taken(world, None)[0] == 2 * BLOCK_TOKENS
        world.loop.close()
        assert world.prefix.blocks == 0


def test_generated_tokens_are_kept_and_a_paused_request_takes_them_back(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, prefix=PrefixCache(64)) as world:
        package = world.publisher.publish("acme", "finance", modules=ALL, rank=4, alpha=8, seed=1)
        world.ask("a", "acme/finance", [9, 8, 7], 3 * BLOCK_TOKENS)
        world.run(lambda: len(world.tokens("a")) == 2 * BLOCK_TOKENS)
        world.loop.pause("a")
        world.check_held(0)
        shutil.rmtree(world.publisher.root / "acme/finance/1")  # it is still in the cache
        world.loop.resume("a")
        world.run()
        assert world.prefix.hits == 2 * BLOCK_TOKENS
        world.check_greedy([9, 8, 7], world.tokens("a"), [(package, 2.0, 1.0)])
