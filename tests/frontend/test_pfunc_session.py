"""Programs with a ServeCore that the tests can make fail. Real sockets."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import stamina

from parrot import P
from parrot.frontend.pfunc.session import pause_s
from parrot.protocol.errors import (
    AlreadySet,
    AuthenticationFailed,
    Cancelled,
    ClusterFull,
    EngineFailed,
    InvalidRequest,
    NoEngine,
    QueueFull,
    QuotaExceeded,
    RateLimited,
    SessionGone,
    TimedOut,
    Unavailable,
    ValidationFailed,
)
from parrot.protocol.sampling import SamplingConfig
from parrot.protocol.serve_client import ServeClient
from tests.support.fake_serve import FakeServe


@P.semantic_function()
def joke(topic: P.Input, style: str, joke: P.Output, why: P.Output):
    """Tell a {{style}} joke about {{topic}}: {{joke}} Explain: {{why}}"""


@P.semantic_function()
def ask(question: P.Input, answer: P.Output):
    """Q {{question}} A {{answer}}"""


@P.semantic_function()
def hang(question: P.Input, answer: P.Output):
    """hang {{question}} {{answer}}"""


@P.semantic_function()
def stop_halfway(question: P.Input, answer: P.Output):
    """halfway {{question}} {{answer}}"""


@P.semantic_function()
def fail(question: P.Input, answer: P.Output):
    """fail {{question}} {{answer}}"""


@pytest.fixture(autouse=True)
def fast_retries() -> object:
    with stamina.set_testing(True, attempts=3):
        yield


def test_the_first_read_opens_no_connection(vm: P.VirtualMachine, serve: FakeServe) -> None:
    with vm.running_scope():
        for question in ("one", "two"):
            ask(question).get()
    assert serve.num_requests["get"] == 2
    assert len(serve.clients) == 1


def test_a_program(vm: P.VirtualMachine, serve: FakeServe) -> None:
    seen: list[str] = []

    def program(topic: str) -> None:
        text, why = joke(topic, "dry")
        assert not text.is_ready
        assert text.is_registered
        assert vm.session_registered
        seen.extend((text.get(), why.get(P.PerformanceCriteria.LATENCY)))
        assert why.content == seen[1]

    seconds = vm.run(program, args=["cats"])
    assert seconds == vm.stat_run_time > 0
    assert seen[0] == "<Tell a dry joke about cats: >"
    assert seen[1] == f"<Tell a dry joke about cats: {seen[0]} Explain: >"
    assert not vm.session_registered
    assert vm.session_id is None
    assert len(serve.ended) == 1


def test_an_async_program(vm: P.VirtualMachine, serve: FakeServe) -> None:
    seen: list[str] = []

    async def program() -> None:
        answers = await asyncio.gather(*[ask.ainvoke(f"q{i}") for i in range(50)])
        final = ask(answers[0])
        seen.extend(await asyncio.gather(*[answer.aget() for answer in answers]))
        seen.append(await final.aget("ttft"))

    vm.run(program, timeit=True)
    assert seen[:50] == [f"<Q q{i} A >" for i in range(50)]
    assert seen[50] == f"<Q {seen[0]} A >"
    assert len(serve.calls) == 51


def test_a_coroutine_is_a_program_too(vm: P.VirtualMachine) -> None:
    async def program() -> None:
        assert await ask("x").aget() == "<Q x A >"

    vm.run(program())


def test_values_that_look_like_placeholders_stay_text(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        text, _ = joke("{{why}}", "{{topic}}")
        assert text.get() == "<Tell a {{topic}} joke about {{why}}: >"


def test_reads_are_cached(vm: P.VirtualMachine, serve: FakeServe) -> None:
    with vm.running_scope():
        answer = ask("x")
        first = answer.get()
        assert (answer.get(), list(answer.stream())) == (first, [first])
    assert answer.get() == first
    assert serve.num_requests["get"] == 1


def test_synchronous_reads_are_marked_as_blocking(vm: P.VirtualMachine, serve: FakeServe) -> None:
    async def read_async() -> None:
        await ask("x").aget()
        await P.agather([ask("y")])
        await P.aany_of([ask("z")])
        assert [piece async for piece in ask("w").astream()]

    with vm.running_scope():
        ask("a").get()
        P.gather([ask("b"), ask("c")])
        P.any_of([ask("d")])
        assert list(ask("e").stream())
        assert sorted(read.blocked for read in serve.reads[1:3]) == [False, True]
        assert [read.blocked for read in (serve.reads[0], *serve.reads[3:])] == [True, True, False]
        serve.reads.clear()
        asyncio.run(read_async())
        assert [read.blocked for read in serve.reads] == [False] * 4


def test_calls_contain_the_options_of_the_function(vm: P.VirtualMachine, serve: FakeServe) -> None:
    @P.semantic_function(models=["tiny"], cache_prefix=False, conversation_template=P.chat_template)
    def f(y: P.Output(P.SamplingConfig(logit_bias={3: 1.0}, stop_str=["a"]))):
        """x {{y}}"""

    with vm.running_scope():
        f()
    (call,) = serve.calls
    assert (call.models, call.cache_prefix, call.chat) == (["tiny"], False, True)
    config = call.parameters[0].sampling_config
    assert config == SamplingConfig(logit_bias={3: 1.0}, stop_str=["a"])


class TestVariables:
    def test_a_variable_created_before_the_session_and_set_late(self, vm: P.VirtualMachine) -> None:
        with vm.running_scope():
            question = P.variable("question")
            assert question.is_registered
            answer = ask(question)
            threading.Timer(0.05, question.set, ["late"]).start()
            assert answer.get(timeout=10) == "<Q late A >"

    def test_a_variable_created_with_content(self, vm: P.VirtualMachine) -> None:
        with vm.running_scope():
            question = P.variable("question", content="now")
            assert question.get() == "now"
            assert ask(question).get() == "<Q now A >"

    def test_a_variable_can_be_set_once(self, vm: P.VirtualMachine) -> None:
        with vm.running_scope():
            question = P.variable("question")
            question.set("a")
            with pytest.raises(AlreadySet):
                question.set("b")
            answer = ask(question)
            answer.get()
            with pytest.raises(AlreadySet):
                answer.set("mine")

    def test_a_premade_output(self, vm: P.VirtualMachine) -> None:
        with vm.running_scope():
            middle = P.variable("middle")
            last = ask(middle)
            assert ask("x", answer=middle) is middle
            assert last.get() == "<Q <Q x A > A >"

    def test_a_variable_from_outside_joins_with_the_first_call(self, vm: P.VirtualMachine) -> None:
        middle = P.variable("middle")
        with vm.running_scope():
            last = ask(middle)
            assert middle.is_registered
            assert ask("x", answer=middle) is middle
            assert last.get() == "<Q <Q x A > A >"

    def test_an_object_parameter_takes_a_variable(self, vm: P.VirtualMachine) -> None:
        with vm.running_scope():
            text, _ = joke("cats", ask("x"))
            assert "Tell a <Q x A > joke" in text.get()

    def test_values_cross_sessions_but_variables_do_not(self, vm: P.VirtualMachine) -> None:
        with vm.running_scope():
            known, unknown = ask("x"), ask("y")
            known.get()
        with vm.running_scope():
            assert ask(known).get() == "<Q <Q x A > A >"
            with pytest.raises(InvalidRequest, match="does not belong to this session"):
                ask(unknown)
            with pytest.raises(InvalidRequest, match="belongs to another session"):
                ask("x", answer=unknown)
        with pytest.raises(SessionGone):
            unknown.get()


class TestStreams:
    def test_stream(self, vm: P.VirtualMachine) -> None:
        with vm.running_scope():
            answer = ask("x")
            pieces = list(answer.stream())
            assert "".join(pieces) == answer.content == "<Q x A >"
            assert len(pieces) > 1

    async def test_astream(self, vm: P.VirtualMachine) -> None:
        with vm.running_scope():
            answer = await ask.ainvoke("x")
            pieces = [piece async for piece in answer.astream(timeout=10)]
            assert "".join(pieces) == answer.content == "<Q x A >"
            assert len(pieces) > 1

    def test_errors_end_a_stream(self, vm: P.VirtualMachine) -> None:
        with vm.running_scope(), pytest.raises(EngineFailed, match="the engine failed"):
            list(fail("x").stream())

    def test_timeouts_end_a_stream(self, vm: P.VirtualMachine) -> None:
        with vm.running_scope(), pytest.raises(TimedOut):
            list(hang("x").stream(timeout=0.05))

    async def test_errors_end_an_async_stream(self, vm: P.VirtualMachine) -> None:
        with vm.running_scope(), pytest.raises(EngineFailed):
            [_ async for _ in fail("x").astream()]

    def test_a_broken_stream_continues(
        self, vm: P.VirtualMachine, serve: FakeServe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = ServeClient.stream_var
        received: list[str] = []

        async def breaking(self: ServeClient, *args: object, **options: object) -> object:
            received.append("")
            async for piece in whole(self, *args, **options):
                received[-1] += piece
                yield piece
                if len(received) < 3:
                    raise Unavailable("broken")

        monkeypatch.setattr(ServeClient, "stream_var", breaking)
        with vm.running_scope():
            answer = ask("x")
            assert "".join(answer.stream()) == "<Q x A >"
        assert len(received) == 3
        assert received[0] != received[2] == "<Q x A >"

    def test_leaving_a_stream_cancels_the_read(
        self, vm: P.VirtualMachine, serve: FakeServe
    ) -> None:
        with vm.running_scope():
            answer = stop_halfway("x")
            stream = answer.stream()
            assert next(stream) == "hal"
            assert not serve.withdrawn.is_set()
            stream.close()
            assert serve.withdrawn.wait(10)
            assert not answer.is_ready

    async def test_leaving_an_async_stream_cancels_the_read(
        self, vm: P.VirtualMachine, serve: FakeServe
    ) -> None:
        with vm.running_scope():
            stream = stop_halfway("x").astream()
            assert await anext(stream) == "hal"
            assert not serve.withdrawn.is_set()
            await stream.aclose()
            assert await asyncio.to_thread(serve.withdrawn.wait, 10)

    def test_the_end_of_the_session_ends_a_pending_stream(
        self, vm: P.VirtualMachine, serve: FakeServe
    ) -> None:
        with vm.running_scope(), ThreadPoolExecutor(1) as reader:
            pending = reader.submit(next, hang("x").stream())
            assert serve.reading.wait(10)
            vm.unregister_session()
            with pytest.raises(SessionGone):
                pending.result(10)
        assert serve.withdrawn.wait(10)


class TestErrors:
    def test_a_failed_call_fails_dependent_calls(self, vm: P.VirtualMachine) -> None:
        with vm.running_scope():
            bad = fail("x")
            for reader in (bad, ask(bad), ask(ask(bad))):
                with pytest.raises(EngineFailed, match="the engine failed"):
                    reader.get()

    def test_a_read_times_out(self, vm: P.VirtualMachine, serve: FakeServe) -> None:
        with vm.running_scope(), pytest.raises(TimedOut):
            hang("x").get(timeout=0.05)

    def test_a_read_times_out_although_the_server_does_not_answer(
        self, vm: P.VirtualMachine, serve: FakeServe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("parrot.frontend.pfunc.session._READ_MARGIN_S", 0.1)
        serve.ignores_timeouts = True
        with vm.running_scope(), pytest.raises(TimedOut, match="no value of `answer`"):
            hang("x").get(timeout=0.05)

    @pytest.mark.parametrize(
        "read", [lambda var: var.get(), lambda var: list(var.stream()), lambda var: P.any_of([var])]
    )
    def test_every_read_notices_a_server_that_hangs(
        self, vm: P.VirtualMachine, monkeypatch: pytest.MonkeyPatch, read: Callable[..., object]
    ) -> None:
        async def never_answer(self: ServeClient) -> None:
            raise Unavailable("no answer")

        monkeypatch.setattr("parrot.frontend.pfunc.session._LIVENESS_INTERVAL_S", 0.01)
        monkeypatch.setattr(ServeClient, "health", never_answer)
        with vm.running_scope(), pytest.raises(Unavailable, match="no answer"):
            read(hang("x"))

    async def test_an_async_read_times_out(self, vm: P.VirtualMachine) -> None:
        with vm.running_scope(), pytest.raises(TimedOut):
            await hang("x").aget(timeout=0.05)

    def test_cancel(self, vm: P.VirtualMachine) -> None:
        with vm.running_scope():
            answer = hang("x")
            waiting = ThreadPoolExecutor(1)
            pending = waiting.submit(answer.get)
            answer.cancel()
            with pytest.raises(Cancelled):
                pending.result(10)
            with pytest.raises(Cancelled):
                ask(answer).get()
            done = ask("x")
            done.get()
            done.cancel()
            assert done.get() == "<Q x A >"
            waiting.shutdown()

    async def test_cancelling_an_async_read_cancels_it_at_the_server(
        self, vm: P.VirtualMachine, serve: FakeServe
    ) -> None:
        with vm.running_scope():
            task = asyncio.create_task(hang("x").aget())
            await asyncio.to_thread(serve.reading.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(serve.withdrawn.wait, 10)

    def test_no_server(self) -> None:
        vm = P.VirtualMachine("http://127.0.0.1:9")
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"), vm.running_scope():
            pytest.fail("the scope must not open")
        assert not vm.session_registered
        assert [t.name for t in threading.enumerate()].count("parrot-io") == 0

        async def program() -> None: ...

        with pytest.raises(Unavailable):
            vm.run(program())  # No warning about a coroutine that was not awaited.

    def test_a_rejected_session(self, vm: P.VirtualMachine, serve: FakeServe) -> None:
        with vm.running_scope():
            serve.errors["call"] = [AuthenticationFailed("no")]
            with pytest.raises(AuthenticationFailed):
                ask("x")
            assert ask("x").get()

    def test_invalid_unicode(self, vm: P.VirtualMachine) -> None:
        with vm.running_scope():
            with pytest.raises(ValidationFailed, match="value"):
                ask("\ud800")
            with pytest.raises(InvalidRequest, match="JSON"):
                P.variable("x").set("\ud800")
            with pytest.raises(InvalidRequest, match="JSON"):
                P.variable("x", "\ud800")

    def test_a_function_without_outputs_cannot_be_called_directly(
        self, vm: P.VirtualMachine
    ) -> None:
        @P.semantic_function()
        def start():
            """You are a parrot."""

        with vm.running_scope(), pytest.raises(InvalidRequest, match="invoke_statefully"):
            start()


class TestRetries:
    def test_calls_and_reads_survive_a_broken_connection(
        self, vm: P.VirtualMachine, serve: FakeServe
    ) -> None:
        with vm.running_scope():
            serve.errors["call"] = [Unavailable("broken"), Unavailable("broken")]
            answer = ask("x")
            serve.errors["get"] = [Unavailable("broken")]
            assert answer.get() == "<Q x A >"
        assert serve.num_requests == {"call": 3, "get": 2, "delete": 1}
        assert len(serve.calls) == 1

    def test_retries_are_limited(self, vm: P.VirtualMachine, serve: FakeServe) -> None:
        with vm.running_scope():
            serve.errors["call"] = [Unavailable("broken")] * 5
            with pytest.raises(Unavailable):
                ask("x")
        assert serve.num_requests["call"] < 5

    def test_error_answers_are_not_retried(self, vm: P.VirtualMachine, serve: FakeServe) -> None:
        with vm.running_scope():
            answer = ask("x")
            serve.errors["get"] = [NoEngine("none")]
            with pytest.raises(NoEngine):
                answer.get()
        assert serve.num_requests["get"] == 1

    def test_setting_is_not_repeated(self, vm: P.VirtualMachine, serve: FakeServe) -> None:
        with vm.running_scope():
            var = P.variable("x")
            serve.errors["set"] = [Unavailable("broken")]
            with pytest.raises(Unavailable):
                var.set("a")
            assert serve.num_requests["set"] == 1
            var.set("a")
            assert var.get() == "a"

    def test_every_call_has_a_key_of_its_own(self, vm: P.VirtualMachine, serve: FakeServe) -> None:
        with vm.running_scope():
            ask("x")
            ask("x")
        assert len({call.idempotency_key for call in serve.calls} - {None}) == 2

    def test_calls_and_reads_wait_for_a_full_queue_to_empty(
        self, vm: P.VirtualMachine, serve: FakeServe
    ) -> None:
        with vm.running_scope():
            serve.errors["call"] = [QueueFull("full")] * 2
            answer = ask("x")
            assert serve.num_requests["call"] == 3
            serve.errors["get"] = [QueueFull("full")] * 2
            assert answer.get()
            assert serve.num_requests["get"] == 3
            serve.errors["call"] = [ClusterFull("full", retry_after_s=6.5)] * 9
            with pytest.raises(ClusterFull) as failure:
                ask("x")
            assert failure.value.retry_after_s == 7.0  # From the header.

    def test_retries_follow_retry_after_within_the_time_limit(self) -> None:
        for retry_after_s in (1.0, 20.0):
            pauses = {pause_s(QueueFull("full", retry_after_s=retry_after_s), 60) for _ in range(9)}
            assert len(pauses) > 1
            assert all(retry_after_s <= pause <= 1.2 * retry_after_s for pause in pauses)
        assert pause_s(RateLimited("used up", retry_after_s=600), 42.0) == 42.0
        assert pause_s(ClusterFull("full", retry_after_s=5), -1.0) == 0.0
        assert pause_s(QueueFull("full"), 60) is True
        assert pause_s(QuotaExceeded("your provider's limit"), 60) is False

    def test_other_quota_errors_are_raised_at_once(
        self, vm: P.VirtualMachine, serve: FakeServe
    ) -> None:
        with vm.running_scope():
            serve.errors["get"] = [QuotaExceeded("your provider's limit")]
            with pytest.raises(QuotaExceeded, match="provider"):
                ask("x").get()
            assert serve.num_requests["get"] == 1


class TestScopes:
    def test_exceptions_pass_through_and_the_session_ends(
        self, vm: P.VirtualMachine, serve: FakeServe
    ) -> None:
        def program() -> None:
            ask("x")
            raise ZeroDivisionError("mine")

        with pytest.raises(ZeroDivisionError, match="mine"):
            vm.run(program)
        assert serve.ended == [serve.calls[0].session_id]
        assert not vm.session_registered

    def test_async_exceptions_pass_through(self, vm: P.VirtualMachine, serve: FakeServe) -> None:
        async def program() -> None:
            raise ZeroDivisionError("mine")

        with pytest.raises(ZeroDivisionError, match="mine"):
            vm.run(program)
        assert len(serve.ended) == 1

    def test_the_end_of_a_session_never_hides_the_program(
        self, vm: P.VirtualMachine, serve: FakeServe, caplog: pytest.LogCaptureFixture
    ) -> None:
        serve.errors["delete"] = [Unavailable("gone")]
        with vm.running_scope():
            answer = ask("x").get()
        assert answer
        assert "was not ended" in caplog.text

    def test_after_the_scope_calls_are_not_sent(
        self, vm: P.VirtualMachine, serve: FakeServe
    ) -> None:
        with vm.running_scope():
            ask("x")
        ask("x").to_request_payload()
        assert len(serve.calls) == 1

    def test_scopes_of_one_machine_share_a_session(
        self, vm: P.VirtualMachine, serve: FakeServe
    ) -> None:
        with vm.running_scope():
            outer = vm.session_id
            with vm.running_scope():
                assert vm.session_id == outer
            assert vm.session_registered
            ask("x").get()
        assert serve.ended == [outer]

    def test_scopes_of_two_machines_nest(self, vm: P.VirtualMachine, url: str) -> None:
        other = P.VirtualMachine(url)
        with vm.running_scope():
            with other.running_scope():
                inner = ask("x")
            assert ask("x").session is not inner.session

    def test_the_global_environment(self, vm: P.VirtualMachine, serve: FakeServe) -> None:
        vm.set_global_env()
        try:
            assert ask("x").get()
            assert vm.session_id is not None
            with ThreadPoolExecutor(4) as pool:  # Each thread has its own context.
                assert len(set(pool.map(lambda n: ask(n).get(), range(8)))) == 8
            with P.VirtualMachine(vm.core_http_addr).running_scope():
                assert ask("x").session.session_id != vm.session_id
        finally:
            vm.unset_global_env()
        assert len(serve.ended) == 2
        vm.unset_global_env()
        assert len(serve.ended) == 2

    def test_a_session_by_hand(self, vm: P.VirtualMachine, serve: FakeServe) -> None:
        vm.register_session()
        session_id = vm.session_id
        with vm.running_scope():
            assert vm.session_id == session_id
        assert vm.session_registered
        vm.unregister_session()
        vm.unregister_session()
        assert serve.ended == [session_id]

    def test_profile(self, vm: P.VirtualMachine, serve: FakeServe) -> None:
        runs: list[int] = []
        seconds = vm.profile(lambda n: runs.append(n), warmups=1, trials=3, args=[7])
        assert runs == [7] * 4
        assert seconds > 0
        assert len(serve.ended) == 4
        with pytest.raises(ValueError, match="trials"):
            vm.profile(lambda: None, trials=0)

    def test_session_info(self, vm: P.VirtualMachine) -> None:
        with vm.running_scope():
            assert vm.session_info().session_id == vm.session_id
        with pytest.raises(InvalidRequest, match="no session"):
            vm.session_info()

    def test_a_program_may_have_a_name(self, url: str) -> None:
        for name in (None, "essay"):
            vm = P.VirtualMachine(url, app=name)
            with vm.running_scope():
                assert vm.session_info().apps == ([] if name is None else [name])

    def test_arguments_override_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PARROT_URL", "http://there:1/v1")
        monkeypatch.setenv("PARROT_KEY", "of-the-environment")
        vm = P.VirtualMachine()
        assert (vm.core_http_addr, vm._api_key) == ("http://there:1", "of-the-environment")
        vm = P.VirtualMachine("http://here:2", api_key="given")
        assert (vm.core_http_addr, vm._api_key) == ("http://here:2", "given")

    def test_the_constructor_sends_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PARROT_URL", raising=False)
        assert P.VirtualMachine().core_http_addr == "http://localhost:9000"
        assert P.VirtualMachine("http://here:1/v1/").core_http_addr == "http://here:1"
        with pytest.raises(ValueError, match="mode"):
            P.VirtualMachine(mode="verbose")

    def test_debug_mode_logs_calls(self, url: str, caplog: pytest.LogCaptureFixture) -> None:
        vm = P.VirtualMachine(url, mode="debug")
        with vm.running_scope():
            ask("x")
        assert "SemanticCall(ask" in caplog.text

    def test_no_thread_is_left(self, vm: P.VirtualMachine) -> None:
        vm.run(lambda: ask("x").get())
        assert "parrot-io" not in [thread.name for thread in threading.enumerate()]


class TestThreads:
    def test_many_threads_share_a_scope(self, vm: P.VirtualMachine, serve: FakeServe) -> None:
        def work(number: int) -> str:
            with vm.running_scope():
                return ask(ask(number)).get()

        with vm.running_scope(), ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(work, range(40)))
        assert answers == [f"<Q <Q {i} A > A >" for i in range(40)]
        assert len({call.session_id for call in serve.calls}) == 1
        assert len(serve.ended) == 1

    def test_a_new_thread_follows_its_arguments(self, vm: P.VirtualMachine) -> None:
        with vm.running_scope(), ThreadPoolExecutor(1) as pool:
            first = ask("x")
            assert pool.submit(lambda: ask(first).get()).result(10)
            assert pool.submit(first.get).result(10)

    async def test_to_thread_keeps_the_scope(self, vm: P.VirtualMachine) -> None:
        with vm.running_scope():
            assert await asyncio.to_thread(lambda: ask("x").get()) == "<Q x A >"

    def test_one_loose_variable_in_many_calls_at_once(
        self, vm: P.VirtualMachine, serve: FakeServe
    ) -> None:
        loose = P.variable("loose")

        async def program() -> None:
            await asyncio.gather(*[ask.ainvoke(loose) for _ in range(20)])

        vm.run(program)
        assert serve.num_requests["create_var"] == 1


CTRL_C = """
import signal, sys
from parrot import P
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job has not
@P.semantic_function()
def hang(answer: P.Output):
    '''hang {{answer}}'''
vm = P.VirtualMachine(sys.argv[1])
try:
    with vm.running_scope():
        answer = hang()
        print("waiting", flush=True)
        answer.get()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_ends_a_blocking_read(url: str, serve: FakeServe) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CTRL_C, url], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        assert serve.reading.wait(30)
        os.kill(process.pid, signal.SIGINT)
        assert process.stdout.read() == "interrupted\n"
    assert process.returncode == 0
    assert serve.withdrawn.wait(30)
    assert len(serve.ended) == 1


def test_a_program_that_exits_leaves_no_session(url: str, serve: FakeServe) -> None:
    code = (
        "import sys; from parrot import P; vm = P.VirtualMachine(sys.argv[1]); vm.set_global_env()"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, url], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(serve.ended) == 1
