"""Time several implementations of one task in alternating rounds and separate processes, and report ratios."""

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path

from ega.experiments.summary import speed_ratios
from ega.testing import peak_memory_mb

Job = namedtuple("Job", "run n_units prepare", defaults=(None,))

# `contenders`: name -> function of (size, folder) that returns a Job. `reference`: the contender that others are
# compared with. `floor`: the contender that does only the unavoidable work, or None.
# `warm_up`: whether a round that is not counted comes first. `by_default`: whether it is timed without being named.
_FIELDS = "title unit reference floor contenders sizes quick_sizes repeats warm_up by_default"
Group = namedtuple("Group", _FIELDS, defaults=(5, True, True))


class NotRunError(RuntimeError):
    "Raised in the set-up of a contender that cannot run at this size; the message says why."


def cpu_seconds():
    "CPU time of this process and of its finished children."
    try:
        import resource
    except ImportError:  # Windows
        return time.process_time()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _reset_peak_memory():
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # no Linux
        pass


def time_once(
    job,  # Job
):  # dict: wall_s, cpu_s, peak_rss_mb, work (the number of units), and what the job returned
    "Run a job once and measure it."
    if job.prepare:
        job.prepare()
    _reset_peak_memory()
    cpu_start, wall_start = cpu_seconds(), time.perf_counter()
    returned = job.run()
    wall, cpu = time.perf_counter() - wall_start, cpu_seconds() - cpu_start
    row = {"wall_s": wall, "cpu_s": cpu, "peak_rss_mb": peak_memory_mb(), "work": job.n_units}
    return row | returned if isinstance(returned, dict) else row


def _exit_with_parent(parent, folder):
    "Remove the shared folder and exit when the parent process has ended."
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def exit_with_parent(
    folder,  # removed at the end
):
    "Start a thread that removes the shared folder and ends this process when its parent process has ended."
    threading.Thread(target=_exit_with_parent, args=(os.getppid(), folder), daemon=True).start()


def _set_up(location, size, folder):
    "The Job of a contender that is given as module:function."
    module, _, name = location.partition(":")
    return getattr(importlib.import_module(module), name)(size, folder)


def worker_main():
    "Main function of a worker process: each request sets a contender up or times one repeat of it."
    folder, parent, jobs = Path(sys.argv[1]), int(sys.argv[2]), {}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    threading.Thread(target=_exit_with_parent, args=(parent, folder), daemon=True).start()
    for line in sys.stdin:
        request, answer = json.loads(line), {}
        try:
            if "location" in request:
                jobs[request["name"]] = _set_up(request["location"], request["size"], folder)
            else:
                answer = time_once(jobs[request["name"]])
        except NotRunError as error:
            answer = {"missing": str(error)}
        except ImportError as error:
            if "pip install" not in str(error):
                raise  # an error of ours, not a missing optional package
            answer = {"missing": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


_THREAD_VARIABLES = ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM")


def _environment(threads, folder):
    "The environment of a worker process."
    return os.environ | {
        **{f"{name}_NUM_THREADS": str(threads) for name in _THREAD_VARIABLES},
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": f"{folder}/hf",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(os.path.abspath(p or ".") for p in sys.path),
    }


class Worker:
    "A process in which contenders are set up and run on request."

    def __init__(self, folder, threads):
        self.log = tempfile.TemporaryFile("w+")
        code = "from harness import worker_main; worker_main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(folder), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=_environment(threads, folder),
        )

    def request(self, name, **arguments):
        "Send a request for a contender without waiting for the answer."
        self.name = name
        try:
            print(json.dumps({"name": name, **arguments}), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass  # `answer` reports why

    def answer(self):
        "Wait for the answer. Raises `RuntimeError` with the last lines of the log when the process has died."
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        code = self.process.wait()
        self.log.seek(0)
        last_lines = " | ".join(self.log.read().strip().splitlines()[-3:])
        raise RuntimeError(f"contender {self.name!r} ended with exit code {code}: {last_lines}")

    def close(self):
        "End the process and close its pipes."
        self.process.kill()
        self.process.wait()
        for f in (self.process.stdin, self.process.stdout, self.log):
            try:
                f.close()
            except BrokenPipeError:
                pass


@contextmanager
def busy_processes(
    n,  # number of processes
):  # context
    "Run `n` processes that keep a core busy each while the block runs."
    code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(n)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def round_orders(
    names,  # contenders
    repeats,  # number of rounds
):  # list of (round, name)
    "The order in which contenders run: every round starts one contender later."
    n = len(names)
    return [(r, names[(r + i) % n]) for r in range(repeats) for i in range(n)]


def _set_up_all(group, size, workers):
    "Set up all contenders, the first one alone; return {name: message} of those that cannot run."
    answers, names = {}, list(group.contenders)
    for name, setup in group.contenders.items():
        workers[name].request(name, location=f"{setup.__module__}:{setup.__qualname__}", size=size)
        if workers[name] is workers[names[0]]:  # the first contender, or a worker that all share
            answers[name] = workers[name].answer()
    for name in names:
        if name not in answers:
            answers[name] = workers[name].answer()
    return {name: answers[name]["missing"] for name in names if "missing" in answers[name]}


def run_group(
    group,  # Group
    size,  # dict, one of its sizes; `threads` in it takes precedence over the argument
    *,
    folder,  # existing folder for what the contenders share
    threads=1,  # of every contender
    repeats=5,  # counted rounds
    worker=None,  # one Worker for all contenders, in a smoke test; None: a process for each
):  # list of dicts, one for each contender and round; one with a status for a contender that cannot run
    "Time the contenders of one group at one size."
    threads = size.get("threads", threads)
    workers = {}
    try:
        for name in group.contenders:
            workers[name] = worker or Worker(folder, threads)
        rows = _timed_rows(group, size, workers, repeats)
    finally:
        for w in workers.values():
            if w is not worker:
                w.close()
    about = {
        "size": json.dumps(size, sort_keys=True),
        "threads": threads,
        "reference": group.reference,
        "floor": group.floor,
        "title": group.title,
        "unit": group.unit,
    }
    return [about | row for row in rows]


def _timed_rows(group, size, workers, repeats):
    "Set the contenders up, warm them up where the group says so, and time them in rounds."
    missing = _set_up_all(group, size, workers)
    present = [name for name in group.contenders if name not in missing]

    def time_in_worker(name):
        workers[name].request(name)
        return workers[name].answer()

    for name in present if group.warm_up else ():
        time_in_worker(name)
    rows = [{"contender": name, "repeat": -1, "status": message} for name, message in missing.items()]
    for r, name in round_orders(present, repeats):
        rows.append({"contender": name, "repeat": r, "status": "ok", **time_in_worker(name)})
    return rows


def sleep_contender(size, folder):
    "Sleep; the CPU time is near zero."
    return Job(lambda: time.sleep(size["seconds"]), 1)


def format_ratios(
    frame,  # rows of `contenders.run_benchmarks`
):  # text of at most 80 columns
    "The ratios of each group and size as text."
    lines = [
        "speed: times as fast as the reference (*), median [quartiles] over the rounds;",
        "CPU, memory: share of the reference's; x floor: wall time over the floor's;",
        "wall s, CPU s, MB (peak memory), LP@1: medians, not divided by the reference's.",
    ]
    for (group, size), part in speed_ratios(frame).groupby(["group", "size"], sort=False):
        first = frame[(frame.group == group) & (frame["size"] == size)].iloc[0]
        facts = {**json.loads(size), "threads": first.threads, "rounds": part.rounds.iloc[0]}
        facts = ", ".join(f"{name} {value}" for name, value in facts.items())
        lines += ["", f"{group}: {first.title}"]
        lines += textwrap.wrap(facts, 78, initial_indent="  ", subsequent_indent="  ")
        measured = part.lp_at_1.notna().any()  # contenders that reach different label precisions
        header, line = (_MEASURED_HEADER, _measured_line) if measured else (_RATIO_HEADER, _ratio_line)
        lines += [f"  {'a ' + first.unit:24s}{header}", *map(line, part.itertuples())]
    return "\n".join(lines)


_RATIO_HEADER = f"{'speed':>8s}  {'quartiles':15s}{'CPU':>7s}{'memory':>8s}{'x floor':>8s}{'rho':>6s}"
_MEASURED_HEADER = f"{'speed':>10s}{'wall s':>10s}{'CPU s':>10s}{'MB':>7s}{'x floor':>10s}{'LP@1':>7s}"


def _number(value, form):
    "A number as text; empty where it is missing."
    return format(value, form) if value == value else ""


def _name_or_status(row):
    "Name of a contender, and the rest of its line if it did not run."
    name = row.contender + (" *" if row.contender == row.reference else "")
    status = row.status.split("; ")[-1].replace("install it with", "not installed")
    return f"  {name:24s}", "" if row.status == "ok" else f"  {status}"


def _ratio_line(row):
    "The line of one contender; a missing number is left empty."
    name, status = _name_or_status(row)
    if status:
        return name + status
    has_quartiles = row.speed == row.speed and row.contender != row.reference
    quartiles = f"[{row.low:.3g}, {row.high:.3g}]" if has_quartiles else ""
    line = f"{name}{_number(row.speed, '.3g'):>8s}  {quartiles:15s}{_number(row.cpu, '.2f'):>7s}"
    line += f"{_number(row.memory, '.2f'):>8s}{_number(row.over_floor, '.2f'):>8s}{_number(row.rho, '.3f'):>6s}"
    return line.rstrip()


def _measured_line(row):
    "The line of one contender in a group that measures label precision: medians over the rounds."
    name, status = _name_or_status(row)
    if status:
        return name + status
    line = f"{name}{_number(row.speed, '.3g'):>10s}{_number(row.wall_s, '.3g'):>10s}{_number(row.cpu_s, '.3g'):>10s}"
    line += f"{_number(row.peak_rss_mb, '.0f'):>7s}{_number(row.over_floor, '.3g'):>10s}"
    return (line + f"{_number(row.lp_at_1, '.3f'):>7s}").rstrip()
