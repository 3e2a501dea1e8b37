"""Code in a sandbox: what it cannot do, and how that ends.

If a guard fails, its test must do no harm to the machine: the code here only asks for what it may, or does what is
harmless and bounded without any guard.
"""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from groupwise.environments import (
    AssistantTurn,
    EnvironmentFailed,
    Limits,
    Sandbox,
    ToolCall,
    ToolEnvironment,
    code_tool,
)
from groupwise.environments import sandbox as sandbox_module
from groupwise.errors import ConfigError, InputError

ONLY_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="namespaces and filters of system calls are Linux's")
LONG = 600.0  # seconds, where no time limit is meant to end the code


@functools.cache
def isolations():
    """What this system has, from the strongest on."""
    found = []
    for mode in ("namespaces", "filter", "plain"):
        place = with_mode(mode)
        result, _ = place._run({"main.py": "print('ready')"}, mode)
        if result is not None and result.stdout == "ready\n":
            found.append(mode)
    return found


def with_mode(mode, **options):
    """A sandbox with a given isolation, also where a stronger one is possible."""
    place = object.__new__(Sandbox)
    place.seconds, place.memory_mb, place.processes, place.file_mb, place.output_bytes = LONG, 1024, 32, 8, 100_000
    place.allow_network, place.allow_files = mode == "plain", mode != "namespaces"
    place.python, place._readable, place.isolation = sys.executable, [sys.prefix, sys.base_prefix], mode
    vars(place).update(options)
    return place


@pytest.fixture(params=["namespaces", "filter"])
def mode(request):
    if request.param not in isolations():
        pytest.skip(f"this system has no sandbox of the kind {request.param}")
    return request.param


@pytest.fixture
def namespaces():
    if "namespaces" not in isolations():
        pytest.skip("this system does not let this user make namespaces")
    return "namespaces"


@pytest.mark.parametrize("mode", ["namespaces", "filter", "plain"], indirect=True)
def test_code_runs_to_its_end(mode):
    result = with_mode(mode).run("import sys\nprint('é' * 3)\nprint('warned', file=sys.stderr)")
    assert (result.stdout, result.stderr, result.exit_code, result.stopped) == ("ééé\n", "warned\n", 0, None)
    assert result.ok
    assert result.error is None
    assert result.seconds > 0


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("print(1)\n1 / 0", "ZeroDivisionError: division by zero"),
        ("if", "SyntaxError: invalid syntax"),
        ("raise SystemExit(3)", "the code ended with exit status 3"),
        ("raise SystemExit('stop')", "stop"),
        ("input()", "EOFError: EOF when reading a line"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "the code was ended by the signal SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "the code was ended by the signal SIGKILL"),
        ("a = '\x00'", "SyntaxError: source code cannot contain null bytes"),
    ],
)
def test_code_that_fails(mode, code, error):
    result = with_mode(mode).run(code)
    assert not result.ok
    assert error in result.error
    assert result.stopped is None


def test_the_same_code_writes_the_same_text(mode):
    code = "import os; print(os.getcwd(), {'a', 'b', 'c', 'd'}, os.environ['HOME']); 1 / 0"
    first, second = (with_mode(mode).run(code) for _ in range(2))
    assert (first.stdout, first.stderr) == (second.stdout, second.stderr)
    assert first.stdout.startswith("/tmp ")
    assert 'File "/tmp/main.py", line 1' in first.stderr


def test_binary_output_is_replaced(mode):
    result = with_mode(mode).run("import sys; sys.stdout.buffer.write(b'a\\xff\\xfe\\x00b'); print('\\ud800')")
    assert result.stdout == "a\ufffd\ufffd\x00b\\ud800\n"


def test_special_tokens_are_plain_text(mode):
    assert with_mode(mode).run("print('<|im_start|>system')").stdout == "<|im_start|>system\n"


def test_the_environment_is_empty(mode, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "secret")
    result = with_mode(mode).run("import os; print(sorted(os.environ))")
    assert "MY_API_KEY" not in result.stdout
    assert "HOME" in result.stdout


@pytest.mark.parametrize("mode", ["namespaces", "filter", "plain"], indirect=True)
def test_there_is_no_network(mode):
    code = """
        import socket
        try:
            socket.create_connection(("{host}", {port}), timeout=5)
        except OSError as error:
            print("refused" if isinstance(error, ConnectionRefusedError) else "no network")
        else:
            print("connected")
    """
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        result = with_mode(mode).run(textwrap.dedent(code.format(host=host, port=port)))
    assert result.stdout == ("connected\n" if mode == "plain" else "no network\n")


@ONLY_LINUX
def test_a_filter_leaves_no_other_way_to_a_socket():
    if "filter" not in isolations():
        pytest.skip("this system has no filters of system calls")
    code = """
        import ctypes, errno, os, socket, subprocess, sys
        libc = ctypes.CDLL(None, use_errno=True)
        calls = {  # none of them does anything without a filter either
            "io_uring_setup": lambda: libc.syscall(425, 8, 0),
            "pidfd_getfd": lambda: libc.syscall(438, -1, -1, 0),
            "mount": lambda: libc.mount(None, None, None, 0, None),
            "umount2": lambda: libc.umount2(None, 0),
            "unshare": lambda: libc.unshare(0),
            "setns": lambda: libc.setns(-1, 0),
            "fsopen": lambda: libc.syscall(430, None, 0),
            "mount_setattr": lambda: libc.syscall(442, -1, None, 0, None, 0),
        }
        print([name for name, call in calls.items() if call() != -1 or ctypes.get_errno() != errno.EACCES])
        left, right = socket.socketpair()
        left.send(b"x")
        print(right.recv(1))
        child = "import socket\\ntry: socket.socket(socket.AF_UNIX)\\nexcept OSError as error: print(error.errno)"
        print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout)
    """
    result = with_mode("filter").run(textwrap.dedent(code))
    assert result.stdout.split("\n")[:3] == ["[]", "b'x'", "13"], result.stderr


def test_memory_is_limited(mode):
    result = with_mode(mode, memory_mb=256).run("text = 'x' * 2**30")
    assert result.error == "MemoryError"


def test_time_is_limited(mode):
    for code in ("while True: pass", "import time\nprint('begun', flush=True)\ntime.sleep(1000)"):
        result = with_mode(mode, seconds=0.3).run(code)
        assert result.stopped == "time"
        assert result.exit_code is None
        assert "too long" in result.error


def test_processes_are_limited(mode):
    code = """
        import os, time
        for _ in range(40):
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
        time.sleep(60)
    """
    result = with_mode(mode, processes=8).run(textwrap.dedent(code))
    assert not result.ok
    assert result.stopped == "processes" or "BlockingIOError" in result.error


def test_a_process_may_start_others(mode):
    assert with_mode(mode).run("import subprocess; print(subprocess.run(['true']).returncode)").stdout == "0\n"


def test_output_is_limited(mode):
    for stream in ("stdout", "stderr"):
        result = with_mode(mode, output_bytes=1000).run(f"import sys\nwhile True: print('x' * 100, file=sys.{stream})")
        assert result.stopped == "output"
        assert len(getattr(result, stream)) == 1000
        assert "too much" in result.error


def test_files_are_limited_and_gone_afterwards(mode):
    place = with_mode(mode)
    result = place.run("with open('large', 'wb') as file:\n    for _ in range(20): file.write(bytes(2**20))")
    assert "OSError" in result.error
    assert place.run("import os; print(os.listdir())").stdout == "['main.py']\n"
    assert list(Path("/tmp").glob("groupwise-sandbox-*/large")) == []


def test_all_files_together_are_limited(namespaces):
    code = "for number in range(20):\n    with open(str(number), 'wb') as file: file.write(bytes(2**20))"
    assert "No space left" in with_mode(namespaces).run(code).error


def test_files_beside_the_code(mode):
    files = {"words.py": "word = 'a'", "table.csv": "1,2"}
    result = with_mode(mode).run("import words; print(words.word, open('table.csv').read())", files)
    assert result.stdout == "a 1,2\n"


def marker():
    """An argument by which a process of this test is found."""
    return f"7{time.time_ns() % 10**8}"


def processes_with(text):
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes())
        except OSError:
            continue
    return [line for line in lines if text.encode() in line and b"main.py" not in line]


@ONLY_LINUX
def test_children_end_with_the_code(mode):
    mark = marker()
    result = with_mode(mode).run(
        f"import subprocess\nsubprocess.Popen(['sleep', '{mark}'], start_new_session=True)\nprint('left')"
    )
    assert result.stdout == "left\n"
    assert processes_with(mark) == []
    place = with_mode(mode, seconds=0.5)
    place.run(f"import subprocess\nsubprocess.run(['sleep', '{mark}'], start_new_session=True)")
    assert processes_with(mark) == []


@ONLY_LINUX
def test_the_code_ends_with_this_process(mode, tmp_path):
    mark = marker()
    script = f"""
        import os, threading, time
        from tests.environments.test_sandbox import processes_with, with_mode
        code = f"import subprocess; subprocess.run(['sleep', '{{os.environ['MARK']}}'], start_new_session=True)"
        threading.Thread(target=with_mode("{mode}").run, args=(code,), daemon=True).start()
        while not processes_with(os.environ["MARK"]):
            time.sleep(0.01)
        print("begun", flush=True)
        os._exit(0)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "MARK": mark, "TMPDIR": str(tmp_path)},
    )
    assert done.stdout == "begun\n", done.stderr
    end = time.monotonic() + 60
    while (processes_with(mark) or list(tmp_path.iterdir())) and time.monotonic() < end:
        time.sleep(0.01)
    assert processes_with(mark) == []
    assert list(tmp_path.iterdir()) == []


def test_the_files_of_the_user_are_not_there(namespaces, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    secret.chmod(0o644)
    tmp_path.chmod(0o755)
    code = f"""
        import os
        print(os.path.exists({str(secret)!r}), os.path.exists("/etc/passwd"), sorted(os.listdir("/tmp")))
        print([bool(os.statvfs(path).f_flag & os.ST_RDONLY) for path in ("/", "/usr", {sys.prefix!r}, "/tmp")])
        print(len([name for name in os.listdir("/proc") if name.isdigit()]) < 5, os.getuid() != 0 or os.getpid() < 5)
    """
    result = with_mode(namespaces).run(textwrap.dedent(code))
    lines = ["False False ['main.py']", "[True, True, True, False]", "True True"]
    assert result.stdout.splitlines() == lines, result.stderr
    readable = with_mode(namespaces, _readable=[sys.prefix, sys.base_prefix, str(tmp_path)])
    code = f"print(open({str(secret)!r}).read())\nopen({str(secret)!r}, 'w')"
    result = readable.run(code)
    assert result.stdout == "secret\n"
    assert "Read-only file system" in result.error
    assert secret.read_text() == "secret"


@ONLY_LINUX
def test_the_code_has_no_rights_of_root(mode):
    code = (
        "print([line.split() for line in open('/proc/self/status') if line.startswith(('CapEff', 'CapBnd', 'NoNew'))])"
    )
    result = with_mode(mode).run(code)
    if "FileNotFoundError" in result.stderr:
        pytest.skip("there is no /proc in a sandbox of this system")
    assert "['CapEff:', '0000000000000000']" in result.stdout
    assert "['NoNewPrivs:', '1']" in result.stdout
    if os.geteuid() == 0:
        assert "['CapBnd:', '0000000000000000']" in result.stdout


def test_a_sandbox_takes_what_the_system_has(namespaces):
    assert Sandbox().isolation == "namespaces"
    assert Sandbox(allow_files=True, allow_network=True).isolation == "namespaces"
    assert Sandbox(seconds=LONG).run("print(1)").stdout == "1\n"


@ONLY_LINUX
def test_a_system_without_isolation_is_refused(monkeypatch):
    original = Sandbox._run

    def run(self, texts, mode):
        return original(self, texts, mode) if mode in allowed else (None, f"no {mode}")

    monkeypatch.setattr(Sandbox, "_run", run)
    monkeypatch.setattr(sandbox_module, "_isolation", sandbox_module._isolation.__wrapped__)
    allowed = ["plain"]
    with pytest.raises(
        ConfigError, match=r"take the network away.*no namespaces.*allow_network=True and allow_files=True"
    ):
        Sandbox()
    with pytest.raises(ConfigError, match=r"take the network away.*no namespaces; no filter.*set allow_network=True"):
        Sandbox(allow_files=True)
    with pytest.raises(ConfigError, match=r"hide your files.*set allow_files=True"):
        Sandbox(allow_network=True)
    assert Sandbox(allow_network=True, allow_files=True).isolation == "plain"
    if "filter" in isolations():
        allowed = ["filter", "plain"]
        assert Sandbox(allow_files=True).isolation == "filter"


@pytest.mark.parametrize(
    "options",
    [
        {"seconds": 0},
        {"seconds": "1"},
        {"memory_mb": 1},
        {"processes": 0},
        {"file_mb": 0.5},
        {"output_bytes": 1},
        {"readable": ["/no/such/path"]},
    ],
)
def test_wrong_settings_are_refused(options):
    with pytest.raises(InputError, match=next(iter(options))):
        Sandbox(**options)


def test_an_interpreter_that_does_not_exist():
    with pytest.raises(ConfigError, match="/no/such/python"):
        Sandbox(python="/no/such/python", allow_network=True, allow_files=True)


@pytest.mark.parametrize("files", [{"../a": ""}, {"a/b": ""}, {"": ""}, {".hidden": ""}, {"main.py": ""}, {"a": b""}])
def test_wrong_files_are_refused(files):
    with pytest.raises(InputError):
        with_mode("plain").run("", files)


def test_too_much_code_is_refused():
    with pytest.raises(InputError, match="at most"):
        with_mode("plain").run("x" * 2**21)


def test_a_system_that_cannot_start_a_process(mode, monkeypatch):
    def popen(*arguments, **options):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(EnvironmentFailed, match="sandbox could not start: Cannot allocate memory"):
        with_mode(mode).run("")


def call(tool, code, limits=None):
    environment = ToolEnvironment([tool], limits or Limits(tool_seconds=LONG, turn_seconds=LONG))
    (result,) = asyncio.run(environment.respond(AssistantTurn("", (ToolCall(tool.__name__, {"code": code}),)))).results
    return result


@pytest.mark.parametrize(
    ("code", "content"),
    [
        ("print(6 * 7)", "42"),
        ("```python\nprint(6 * 7)\n```", "42"),
        ("6 * 7", "(the code printed nothing; print what you want to see)"),
        ("print(1)\n\n1 / 0", "1\nZeroDivisionError: division by zero (line 3)"),
        ("def f():\n    g()\nf()", "NameError: name 'g' is not defined (line 2)"),
        ("print(1", "SyntaxError: '(' was never closed (line 1)"),
    ],
)
def test_a_tool_that_runs_code(mode, code, content):
    result = call(code_tool(with_mode(mode)), code)
    assert result.ok
    assert result.content == content


def test_a_tool_says_that_time_was_up(mode):
    result = call(code_tool(with_mode(mode, seconds=0.3)), "print('begun', flush=True)\nwhile True: pass")
    assert result.content.endswith("the code took too long and was stopped")


def test_the_tool_has_a_name_and_a_schema(mode):
    tool = code_tool(with_mode(mode), name="run")
    (schema,) = ToolEnvironment([tool]).schemas
    assert schema["function"]["name"] == "run"
    assert list(schema["function"]["parameters"]["properties"]) == ["code"]
    with pytest.raises(ConfigError, match="'two words'"):
        code_tool(with_mode(mode), name="two words")


def test_a_megabyte_of_output_is_cut_for_the_model(mode):
    tool = code_tool(with_mode(mode, output_bytes=10**7))
    result = call(tool, "print('x' * 10**6)", Limits(tool_seconds=LONG, turn_seconds=LONG, max_reply_chars=500))
    assert len(result.content) == 500


def test_no_descriptor_is_left_open(mode):
    place = with_mode(mode)
    place.run("")
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    for _ in range(3):
        place.run("1 / 0")
    assert not before or len(os.listdir("/proc/self/fd")) <= before
