"""The gate around a vLLM engine client: who waits, what is aborted, and which version a reply says it has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engine_adapter.hosted.replies import Reply, current_reply
from engine_adapter.replica.admission import Limits
from engine_adapter.replica.replies import Span, Wanted
from engine_adapter.vllm.gate import VllmGate
from updater.core.errors import Aborted, Failure, Rejected, Unavailable
from updater.core.policy import CachePolicy, InFlight
from updater.core.version import Version


@dataclass
class Sequence:
    index: int
    weight_versions: list[Span] | None = None
    finish_reason: str | None = None


@dataclass
class Pooled:
    data: torch.Tensor


@dataclass
class Output:
    """As much of vLLM's RequestOutput or PoolingRequestOutput as the gate looks at."""

    outputs: list[Sequence] | Pooled
    finished: bool
    num_cached_tokens: int | None = None


@dataclass
class Engine:
    """A client whose requests end when they are told to."""

    prompts: list[Any] = field(default_factory=list)
    ends: dict[str, asyncio.Future[Output]] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    label: str = "0-1"
    knows: asyncio.Event | None = None  # until then a request is on its way, and an abort finds none

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Output, None]:
        self.prompts.append(prompt)
        if self.knows is not None:
            await self.knows.wait()
        self.ends[request_id] = asyncio.get_running_loop().create_future()
        yield Output([Sequence(0)], False)
        yield await self.ends[request_id]

    async def encode(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Output, None]:
        self.ends[request_id] = asyncio.get_running_loop().create_future()
        yield await self.ends[request_id]

    def finish(self, request_id: str, *spans: Span, reason: str = "length") -> None:
        made = list(spans) or [Span(self.label, 0, 4)]
        self.ends[request_id].set_result(Output([Sequence(0, made, reason)], True, 2))

    def pool(self, request_id: str, *values: float) -> None:
        self.ends[request_id].set_result(Output(Pooled(torch.tensor(values)), True))

    async def abort(self, request_id: str) -> None:
        if request_id not in self.ends:
            return
        self.aborted.append(request_id)
        if not self.ends[request_id].done():
            self.finish(request_id, reason="abort")


@dataclass
class World:
    engine: Engine
    gate: VllmGate

    @property
    def generate(self) -> Callable[..., AsyncGenerator[Any, None]]:
        return self.gate.gating(self.engine.generate)

    def ask(
        self, request_id: str, wanted: Wanted | None = None, prompt: Any = None, within: Reply | None = None
    ) -> tuple[Reply, asyncio.Task[Any]]:
        """`within`: a reply that has called before."""
        reply = within or Reply(wanted or Wanted())

        async def run() -> list[Any]:
            current_reply.set(reply)
            return [output async for output in self.generate(prompt or {"prompt_token_ids": [1]}, None, request_id)]

        return reply, asyncio.create_task(run())

    def embed(self, request_id: str) -> tuple[Reply, asyncio.Task[Any]]:
        reply = Reply()

        async def run() -> list[Any]:
            current_reply.set(reply)
            encode = self.gate.gating(self.engine.encode)
            return [output async for output in encode({"prompt_token_ids": [1]}, None, request_id)]

        return reply, asyncio.create_task(run())


def run(main: Callable[[World], Awaitable[None]], **limits: float) -> None:
    async def bounded() -> None:
        engine = Engine()
        world = World(engine, VllmGate(engine.abort, Limits(**limits)))  # type: ignore[arg-type]
        await asyncio.wait_for(main(world), 60)

    asyncio.run(bounded())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_call_waits_until_the_gate_opens_and_its_reply_says_what_made_it() -> None:
    async def main(world: World) -> None:
        reply, task = world.ask("a")
        await settle()
        assert (world.gate.waiting, world.engine.prompts) == (1, [])
        world.gate.open("0-1")
        await settle()
        assert (world.gate.waiting, world.gate.in_flight) == (0, 1)
        world.engine.finish("a")
        await task
        assert reply.spans_of(0) == (Span("0-1", 0, 4),)
        assert reply.parts[0].cached_tokens == 2
        assert world.gate.in_flight == 0

    run(main)


def test_a_call_that_waits_too_long_is_refused() -> None:
    async def main(world: World) -> None:
        reply, task = world.ask("a")
        with pytest.raises(Unavailable) as caught:
            await task
        assert caught.value.code == "shut"
        assert reply.failure is caught.value

    run(main, wait_s=0.01)


def test_drain_waits_for_what_runs_and_holds_back_what_comes() -> None:
    async def main(world: World) -> None:
        world.gate.open("0-1")
        _, first = world.ask("a")
        await settle()
        assert world.gate.close(InFlight.DRAIN, "0-2") == (0, 0)
        _, second = world.ask("b")
        quiet = asyncio.create_task(world.gate.quiesce(InFlight.DRAIN, 30))
        await settle()
        assert (quiet.done(), world.gate.waiting) == (False, 1)
        world.engine.finish("a")
        await first
        await quiet
        world.gate.open("0-2")
        world.engine.label = "0-2"
        await settle()
        world.engine.finish("b")
        await second

    run(main)


def test_a_drain_that_takes_too_long_says_so() -> None:
    async def main(world: World) -> None:
        world.gate.open("0-1")
        _, task = world.ask("a")
        await settle()
        world.gate.close(InFlight.DRAIN, "0-2")
        with pytest.raises(Aborted) as caught:
            await world.gate.quiesce(InFlight.DRAIN, 0.01)
        assert caught.value.code == "quiesce_timeout"
        world.engine.finish("a")
        await task

    run(main)


def test_abort_ends_what_runs_and_the_reply_says_why() -> None:
    async def main(world: World) -> None:
        world.gate.open("0-1")
        reply, task = world.ask("a")
        await settle()
        assert world.gate.close(InFlight.ABORT, "0-2") == (1, 0)
        await world.gate.quiesce(InFlight.ABORT, 30)
        await task
        assert world.engine.aborted == ["a"]
        assert reply.ended_by_update

    run(main)


def test_an_abort_that_came_before_the_engine_knew_the_request_is_said_again() -> None:
    async def main(world: World) -> None:
        world.engine.knows = asyncio.Event()
        world.gate.open("0-1")
        _, task = world.ask("a")
        await settle()
        world.gate.close(InFlight.ABORT, "0-2")
        await settle()
        assert world.engine.aborted == []
        world.engine.knows.set()
        await world.gate.quiesce(InFlight.ABORT, 30)
        await task
        assert world.engine.aborted == ["a"]

    run(main)


def test_a_prompt_without_room_for_a_namespace_is_refused() -> None:
    async def main(world: World) -> None:
        world.gate.relabelled("0-1", "ab", CachePolicy.RESET)
        world.gate.open("0-1")
        reply, task = world.ask("a", prompt=object())
        with pytest.raises(Rejected) as caught:
            await task
        assert (caught.value.code, reply.failure) == ("mode_unsupported", caught.value)
        assert (world.engine.prompts, world.gate.in_flight) == ([], 0)

    run(main)


@pytest.mark.parametrize(("mode", "requeued"), [(InFlight.KEEP, 0), (InFlight.RECOMPUTE, 1)])
def test_modes_that_let_requests_live_on_allow_two_spans(mode: InFlight, requeued: int) -> None:
    async def main(world: World) -> None:
        world.gate.open("0-1")
        reply, task = world.ask("a")
        await settle()
        assert world.gate.close(mode, "0-2") == (0, requeued)
        await world.gate.quiesce(mode, 30)
        world.gate.open("0-2")
        world.engine.finish("a", Span("0-1", 0, 2), Span("0-2", 2, 4))
        await task
        assert reply.spans_of(0) == (Span("0-1", 0, 2), Span("0-2", 2, 4))
        assert world.gate.mixed == 0

    run(main)


def test_a_reply_that_would_mix_versions_without_leave_is_not_given() -> None:
    async def main(world: World) -> None:
        world.gate.open("0-1")
        reply, task = world.ask("a")
        await settle()
        world.engine.finish("a", Span("0-1", 0, 2), Span("0-2", 2, 4))
        with pytest.raises(Unavailable):
            await task
        assert (world.gate.mixed, reply.failure is not None) == (1, True)

    run(main)


def test_what_asked_for_exactly_another_version_ends_at_the_switch() -> None:
    async def main(world: World) -> None:
        world.gate.open("0-1")
        _, stays = world.ask("a")
        _, ends = world.ask("b", Wanted(exact=Version(0, 1)))
        await settle()
        world.gate.close(InFlight.RECOMPUTE, "0-2")
        world.gate.before_switch("0-2")
        await settle()
        assert world.engine.aborted == ["b"]
        world.engine.finish("a")
        await asyncio.gather(stays, ends)

    run(main)


def test_a_version_that_is_not_coming_is_refused_at_once() -> None:
    async def main(world: World) -> None:
        world.gate.open("0-1")
        reply, task = world.ask("a", Wanted(minimum=Version(0, 2)))
        with pytest.raises(Rejected) as caught:
            await task
        assert caught.value.code == "version_not_served"
        assert reply.failure is caught.value
        world.gate.close(InFlight.DRAIN, "0-2")
        _, waits = world.ask("b", Wanted(minimum=Version(0, 2)))
        await settle()
        assert world.gate.waiting == 1
        world.gate.open("0-2")
        await settle()
        world.engine.finish("b", Span("0-2", 0, 4))
        await waits

    run(main)


def test_a_replica_that_breaks_tells_those_that_wait_and_those_that_run() -> None:
    async def main(world: World) -> None:
        world.gate.open("0-1")
        running, runs = world.ask("a")
        await settle()
        world.gate.close(InFlight.DRAIN, "0-2")
        waiting, waits = world.ask("b")
        await settle()
        world.gate.break_down(Failure("rank_died", "gone", rank=1))
        await asyncio.gather(runs, waits, return_exceptions=True)
        assert world.engine.aborted == ["a"]
        assert not running.ended_by_update  # that is not why
        assert all(reply.failure is not None for reply in (running, waiting))
        world.gate.open("0-2")  # not before it was mended
        assert not world.gate.is_open
        world.gate.mend()
        world.gate.open("0-2")
        assert world.gate.is_open

    run(main)


@pytest.mark.parametrize(
    ("prompt", "salted"),
    [
        ({"prompt_token_ids": [1]}, {"prompt_token_ids": [1], "cache_salt": "0-1:ab"}),
        ({"prompt_token_ids": [1], "cache_salt": "mine"}, {"prompt_token_ids": [1], "cache_salt": "mine/0-1:ab"}),
        ("text", {"prompt": "text", "cache_salt": "0-1:ab"}),
    ],
)
def test_prompts_carry_the_namespace_of_what_is_live(prompt: Any, salted: Any) -> None:
    """I5: a block of another version, or of other bytes under the same label, is never a prefix."""

    async def main(world: World) -> None:
        world.gate.relabelled("0-1", "ab", CachePolicy.RESET)
        world.gate.open("0-1")
        _, task = world.ask("a", prompt=prompt)
        await settle()
        assert world.engine.prompts == [salted]
        world.engine.finish("a")
        await task

    run(main)


def test_routes_may_name_the_arguments_in_any_order() -> None:
    """As vLLM's pooling routes do."""

    async def main(world: World) -> None:
        world.gate.open("0-1")
        world.gate.relabelled("0-1", "ab", CachePolicy.RESET)
        outputs = world.generate(request_id="a", prompt={"prompt_token_ids": [1]}, params=None)
        first = await anext(outputs)
        assert not first.finished
        assert world.engine.prompts == [{"prompt_token_ids": [1], "cache_salt": "0-1:ab"}]
        await outputs.aclose()
        assert world.gate.in_flight == 0

    run(main)


def test_a_prompt_is_salted_when_it_is_dispatched_and_not_when_it_waits() -> None:
    async def main(world: World) -> None:
        world.gate.relabelled("0-1", "ab", CachePolicy.RESET)
        _, task = world.ask("a")
        await settle()
        world.gate.relabelled("0-2", "cd", CachePolicy.RESET)
        world.gate.open("0-2")
        await settle()
        assert world.engine.prompts[0]["cache_salt"] == "0-2:cd"
        world.engine.finish("a", Span("0-2", 0, 4))
        await task

    run(main)


def test_the_keep_policy_keeps_the_namespace() -> None:
    async def main(world: World) -> None:
        world.gate.relabelled("0-1", "ab", CachePolicy.RESET)
        world.gate.relabelled("0-2", "cd", CachePolicy.KEEP)
        assert world.gate.namespace == "0-1:ab"
        world.gate.relabelled("0-3", "ef", CachePolicy.NAMESPACE)
        assert world.gate.namespace == "0-3:ef"

    run(main)


@pytest.mark.case("F08")
def test_a_reply_in_a_namespace_that_outlived_a_switch_may_be_stale() -> None:
    """As of its dispatch, and only where it found something."""

    async def main(world: World) -> None:
        async def found(request_id: str, version: str) -> tuple[dict[str, bool], dict[str, bool]]:
            world.engine.label = version
            reply, task = world.ask(request_id)
            await settle()
            world.engine.finish(request_id)
            await task
            reply.part().stale = True  # another call, which found nothing
            return reply.found_stale(), reply.found_stale(1)

        seen = []
        for step, cache in enumerate([CachePolicy.RESET, CachePolicy.KEEP, CachePolicy.NAMESPACE]):
            world.gate.close(InFlight.DRAIN, f"0-{step}")
            world.gate.relabelled(f"0-{step}", "ab", cache)
            world.gate.open(f"0-{step}")
            seen.append(await found(f"r{step}", f"0-{step}"))
        assert seen == [({}, {}), ({"stale_prefix": True}, {}), ({}, {})]

    run(main)


@pytest.mark.parametrize(
    ("mode", "cache"),
    [
        (InFlight.DRAIN, CachePolicy.KEEP),  # all that 0-2 caches lies there
        (InFlight.KEEP, CachePolicy.NAMESPACE),  # requests in flight go on there
        (InFlight.RECOMPUTE, CachePolicy.RESET),
    ],
)
def test_a_namespace_that_another_version_wrote_into_is_never_entered_again(mode: InFlight, cache: CachePolicy) -> None:
    """I5. A rollback serves the same bytes under the same label, and finds no block that others have made since."""

    async def main(world: World) -> None:
        world.gate.relabelled("0-1", "ab", CachePolicy.RESET)
        world.gate.open("0-1")
        assert world.gate.namespace == "0-1:ab"
        world.gate.close(mode, "0-2")
        world.gate.relabelled("0-2", "cd", cache)
        world.gate.open("0-2")
        world.gate.close(InFlight.DRAIN, "0-1")
        world.gate.relabelled("0-1", "ab", CachePolicy.NAMESPACE)
        world.gate.open("0-1")
        assert world.gate.namespace.startswith("0-1:ab:")

    run(main)


def test_updates_that_requests_live_through_leave_nothing_that_grows() -> None:
    async def main(world: World) -> None:
        for step in range(300):
            world.gate.close(InFlight.RECOMPUTE, f"0-{step}")
            world.gate.relabelled(f"0-{step}", "ab", CachePolicy.RESET)
            world.gate.open(f"0-{step}")
        assert len(world.gate._open_to) == len(world.gate._namespaces._mixed) == 64

    run(main)


def test_a_clean_namespace_is_entered_again() -> None:
    """Its name is equal on every replica, so that a shared tier serves all of them."""

    async def main(world: World) -> None:
        for version, digest in (("0-1", "ab"), ("0-2", "cd"), ("0-1", "ab")):
            world.gate.close(InFlight.DRAIN, version)
            world.gate.relabelled(version, digest, CachePolicy.NAMESPACE)
            world.gate.open(version)
            assert world.gate.namespace == f"{version}:{digest}"

    run(main)


@pytest.mark.parametrize("mode", [InFlight.DRAIN, InFlight.ABORT])
def test_a_client_that_reads_nothing_holds_no_update_up(mode: InFlight) -> None:
    async def main(world: World) -> None:
        world.gate.open("0-1")
        reply = Reply()
        current_reply.set(reply)
        outputs = world.generate({"prompt_token_ids": [1]}, None, "a")
        await anext(outputs)  # and then it reads nothing
        world.gate.close(mode, "0-2")
        await settle()
        if mode is InFlight.DRAIN:
            world.engine.finish("a")
        await world.gate.quiesce(mode, 30)
        assert world.gate.in_flight == 0
        rest = [output async for output in outputs]
        assert [output.finished for output in rest] == [True]
        assert reply.spans_of(0) == (Span("0-1", 0, 4),)
        assert reply.ended_by_update == (mode is InFlight.ABORT)

    run(main)


def test_a_reply_that_was_whole_when_it_was_told_to_end_is_whole() -> None:
    """Its last output was on its way."""

    async def main(world: World) -> None:
        world.gate.open("0-1")
        reply, task = world.ask("a")
        await settle()
        world.engine.finish("a")
        world.gate.close(InFlight.ABORT, "0-2")
        await world.gate.quiesce(InFlight.ABORT, 30)
        await task
        assert not reply.ended_by_update

    run(main)


@pytest.mark.parametrize(
    ("mode", "beam", "goes_on"),
    [
        (InFlight.DRAIN, False, False),
        (InFlight.ABORT, False, False),
        (InFlight.RECOMPUTE, False, True),
        (InFlight.KEEP, False, True),
        (InFlight.KEEP, True, False),  # of which it is not known what made which token
    ],
)
def test_a_reply_of_several_calls_mixes_versions_only_where_one_of_one_call_would(
    mode: InFlight, beam: bool, goes_on: bool
) -> None:
    """I2. Between two calls nothing of it is in flight."""

    async def main(world: World) -> None:
        world.gate.open("0-1")
        reply, first = world.ask("a", within=Reply(asked=b'{"use_beam_search": true}' if beam else b""))
        await settle()
        world.engine.finish("a")
        await first
        for version in ("0-1", "0-2"):  # of an update that is taken back, and of one that is not
            world.gate.close(mode, "0-2")
            await world.gate.quiesce(mode, 30)
            _, second = world.ask("b" + version, within=reply)
            await settle()
            world.gate.open(version)
            world.engine.label = version
            await settle()
            if version == "0-1" or goes_on:
                world.engine.finish("b" + version)
                await second
            else:
                with pytest.raises(Unavailable) as caught:
                    await second
                assert (caught.value.code, caught.value.retryable) == ("aborted_by_update", True)
                assert (reply.failure, world.gate.in_flight) == (caught.value, 0)

    run(main)


@pytest.mark.parametrize("mode", [InFlight.ABORT, InFlight.RECOMPUTE])
def test_what_an_update_left_of_a_pooled_answer_is_no_answer(mode: InFlight) -> None:
    """Ended, it is empty; gone on, it is not known which version computed it."""

    async def main(world: World) -> None:
        world.gate.relabelled("0-1", "ab", CachePolicy.RESET)
        world.gate.open("0-1")
        reply, task = world.embed("a")
        await settle()
        world.gate.close(mode, "0-2")
        if mode is InFlight.ABORT:
            world.engine.pool("a")
        else:
            world.gate.relabelled("0-2", "cd", CachePolicy.RESET)
            world.gate.open("0-2")
            world.engine.pool("a", 1.0)
        with pytest.raises(Unavailable) as caught:
            await task
        assert (caught.value.code, reply.failure) == ("aborted_by_update", caught.value)

    run(main)


def test_a_pooled_answer_says_the_version_that_computed_it() -> None:
    async def main(world: World) -> None:
        world.gate.relabelled("0-1", "ab", CachePolicy.RESET)
        world.gate.open("0-1")
        reply, task = world.embed("a")
        await settle()
        world.engine.pool("a", 1.0)
        await task
        assert (reply.spans_of(0), reply.failure) == ((Span("0-1", 0, 0),), None)

    run(main)


def test_as_many_sequences_are_expected_as_were_asked_for() -> None:
    @dataclass
    class Params:
        n: int = 3

    async def generate(prompt: Any, sampling_params: Any, request_id: str) -> AsyncGenerator[Output, None]:
        yield Output([Sequence(0, [Span("0-1", 0, 1)], "stop")], True)

    async def main(world: World) -> None:
        world.gate.open("0-1")
        reply = Reply()
        current_reply.set(reply)
        for request_id in ("a", "b"):
            outputs = world.gate.gating(generate)({"prompt_token_ids": [1]}, Params(), request_id)
            assert len([output async for output in outputs]) == 1
        assert (reply.choices, [bool(reply.spans_of(choice)) for choice in range(6)]) == (6, [True, False, False] * 2)

    run(main)


def test_a_client_that_leaves_leaves_nothing_behind() -> None:
    async def main(world: World) -> None:
        world.gate.open("0-1")
        _, task = world.ask("a")
        await settle()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert world.gate.in_flight == 0

    run(main)
