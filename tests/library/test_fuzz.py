"Damaged, exchanged and hostile files are refused in one sentence, in seconds and bounded memory; nothing is executed."

import ast
import json
import os
import pickle
import selectors
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fuzzing import MEGABYTES, READERS, SECONDS, Mean, Payload, attempt, bomb, onnx_file, png, rows, unfolding

from ega import cli, estimator
from ega.data import datasets, embed, encoders, packs, vectors
from ega.data.arrays import InputError
from ega.data.files import atomic_folder, atomic_write, open_npy, read_csv_columns, read_json, read_npz
from ega.data.vectors import read_matrix
from ega.method.adapters import LinearAdapter, load_adapter

HERE = Path(__file__).resolve().parent
FINE = {
    "good",
    "refused",
    "same",
    "taken",
    "kept",
}  # taken: another value, where nothing could tell; kept: refused, with the rows of a transform that can go on


def lines(process, silence):
    "Lines of a process; None when it says nothing for so long, and the end."
    buffer = b""
    with selectors.DefaultSelector() as s:
        s.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not s.select(silence):
                yield None
                return
            if not (piece := os.read(process.stdout.fileno(), 2**16)):
                return
            *whole, buffer = (buffer + piece).split(b"\n")
            yield from whole


@pytest.fixture(scope="session")
def told(tmp_path_factory, pytestconfig):
    "The outcome of each file: {reader: [dict]}. A process that dies or hangs is replaced; its file has failed."
    left, said = list(READERS), {name: [] for name in READERS}
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    while left:
        process = subprocess.Popen(
            [
                sys.executable,
                HERE / "fuzzing.py",
                "6" if pytestconfig.getoption("--slow") else "1",
                tmp_path_factory.mktemp("fuzz"),
                *left,
            ],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        last, silent = {"reader": left[0], "file": "", "damage": ""}, False
        for line in lines(process, 60 + 3 * SECONDS):
            if line is None:
                silent = True
                break
            last = json.loads(line)
            if "outcome" in last:
                said[last["reader"]].append(last)
        if silent:
            process.kill()
        process.wait()
        process.stdout.close()
        done = left.index(last["reader"])
        if not silent and process.returncode == 0:
            break
        if "outcome" not in last or process.returncode != 0:
            said[last["reader"]].append(
                last
                | {
                    "outcome": "hung" if silent else "crashed",
                    "said": f"exit code {process.returncode}",
                    "seconds": 0,
                    "megabytes": 0,
                }
            )
        left = left[done + 1 :]
    return said


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_refused(told, count, name):
    found = told[name]
    bad = [f for f in found if f["outcome"] not in FINE or f["megabytes"] > MEGABYTES]
    assert not bad, f"{len(bad)} of {len(found)}, first {bad[0]}"
    assert (
        found[0]["outcome"] == "good"
        and sum(f["outcome"] == "refused" for f in found) > 9
        or name == "images in a folder"
    )  # there a bad image is skipped by name
    count(f"bad files: {name}", len(found) - 1)


def test_the_fuzzing_harness_detects_faults(tmp_path):
    "A leak, an allocation on a file's word, a long story, a slow reader, a hungry one."
    import signal

    import fuzzing

    def raises(error):
        raise error

    def hungry(f):
        return len(bytearray(os.urandom(2**20) * 900))

    def allocates(f):
        try:
            np.empty(10**17)
        except MemoryError as error:
            raise InputError("no") from error

    def slow(f):
        while True:
            pass

    before, fuzzing.SECONDS = signal.signal(signal.SIGALRM, fuzzing.rang), 0.2
    try:
        verdicts = {
            k: attempt(f, tmp_path)[0]
            for k, f in dict(
                leaked=lambda f: raises(KeyError("x")),
                allocated=allocates,
                refused=lambda f: raises(InputError("x")),
                hung=slow,
                read=lambda f: 1,
                **{"long-winded": lambda f: raises(InputError("x\ny"))},
            ).items()
        }
    finally:
        signal.signal(signal.SIGALRM, before)
        fuzzing.SECONDS = SECONDS
    assert all(k == v for k, v in verdicts.items()) and attempt(hungry, tmp_path)[3] > MEGABYTES


def test_damaged_column_metadata_is_refused(tmp_path):
    "Reading a field of it makes pyarrow 26.0.1 abort; statistics that nothing reads may be damaged."
    done = subprocess.run([sys.executable, HERE / "fuzzing.py", "bits", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-300:]
    told = json.loads(done.stdout)
    assert told["changed"] == 0 and told["refused"] > 2000 and told["size statistics"] > 10


def read_whole(path):
    return read_matrix(path).array()


# -- sizes ---------------------------------------------------------------------------------------------------


def test_decompression_bombs_are_refused(tmp_path, count):
    "Archives and tables of a few hundred kilobytes that say 600 MB to 5 GB."
    text = "x" * 1000
    bombs = {
        "a.npz": bomb(),
        "wide.parquet": unfolding({"v": [0.0] * 64}, 3_000_000),
        "pack.parquet": unfolding(
            {"id": text, "label": text, "split": text, "scale": text, "code": text}, 2_000_000, store_schema=False
        ),
    }
    calls = {"a.npz": read_whole, "wide.parquet": read_whole, "pack.parquet": packs.read_pack}
    for name, content in bombs.items():
        (tmp_path / name).write_bytes(content)
        outcome, said, seconds, megabytes = attempt(lambda f: calls[name](f / name), tmp_path)
        said = said.replace(str(tmp_path), "")
        assert outcome == "refused" and "decompress" in said, (name, outcome, said)
        assert megabytes < MEGABYTES and len(content) < 3e6, (name, megabytes, len(content))
    count("decompression bombs", len(bombs))


def test_image_bombs_are_skipped_and_named(tmp_path):
    "A strip whose resize would take 150 million pixels, and a picture of 400 million."
    import struct
    import zlib

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    huge = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 20_000, 20_000, 8, 0, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(bytes(10**6)))
        + chunk(b"IEND", b"")
    )
    for name, b in (("a", png((1, 2, 3))), ("huge", huge), ("strip", png((1, 2, 3), (1, 3000)))):
        (tmp_path / "f").mkdir(exist_ok=True)
        (tmp_path / "f" / f"{name}.png").write_bytes(b)

    class Big(Mean):
        def prepare(self, raw):
            return encoders.preprocess_image(raw, encoders.ImagePreprocessing())

    outcome, done, _, megabytes = attempt(
        lambda f: embed.embed(f / "f", Big(), f / "p.parquet", on_error="skip", progress=False), tmp_path
    )
    assert (
        outcome == "read"
        and sorted(done.skipped) == ["huge.png", "strip.png"]
        and "thin strip" in done.skipped["strip.png"]
        and megabytes < 200
    )


# -- nothing is unpickled or run -------------------------------------------------------------------------------


def test_the_pickle_payload_works_when_unpickled(tmp_path):
    "The tests below would notice."
    pickle.loads(pickle.dumps(Payload(tmp_path / "MARK")))
    assert (tmp_path / "MARK").exists()


def planted(folder):
    "A payload in every dress."
    mark, paths = folder / "MARK", {}

    def add(name, write):
        write(folder / name)
        paths[name] = folder / name

    p = Payload(mark)
    add("objects.npy", lambda f: np.save(f, np.array([[p]], object), allow_pickle=True))
    add("objects.npz", lambda f: np.savez(f, x=np.array([[p]], object), allow_pickle=True))
    add("weights.pt", lambda f: torch.save({"a": p}, f))
    add("weights.safetensors", lambda f: torch.save({"a": p}, f))
    add("plain.npy", lambda f: f.write_bytes(pickle.dumps(p)))
    add("labels.csv", lambda f: f.write_bytes(pickle.dumps(p)))
    field = pa.field(
        "v",
        pa.list_(pa.float32(), 2),
        metadata={"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickle.dumps(p)},
    )
    add(
        "t.parquet",
        lambda f: pq.write_table(
            pa.table(
                [pa.array([[1.0, 0.0]], pa.list_(pa.float32(), 2))],
                schema=pa.schema([field], metadata={"ega": pickle.dumps(p), "pandas": pickle.dumps(p)}),
            ),
            f,
        ),
    )
    add("adapter.json", lambda f: f.write_bytes(pickle.dumps(p)))
    return mark, paths


def test_nothing_is_unpickled(tmp_path, count):
    "Every reader of files on every payload; refused or read, no mark is left."
    from ega.deploy import index, monitor
    from ega.experiments import grids
    from ega.method import interface

    readers = [
        packs.read_pack,
        lambda path: read_matrix(path).array(),
        vectors.read_labels,
        estimator.EmbeddingAdapter.load,
        lambda p: interface.read_adapter(Path(p), ""),
        index.AdaptedIndex.load,
        monitor.Monitor.load,
        datasets.open_input_source,
        datasets.read_image_archive,
        datasets.read_csv_source,
        datasets.read_clinc,
        encoders.OnnxImageEncoder,
        read_json,
        open_npy,
        read_npz,
        read_csv_columns,
        lambda p: grids._read_parquet(p, None),
        lambda p: load_adapter(p),
    ]
    mark, paths = planted(tmp_path)
    for read in readers:
        for path in paths.values():
            try:
                read(
                    path,
                    *(["x"] if read in (read_json, read_csv_columns) else []),
                )
            except InputError:
                pass
    assert not mark.exists()
    count("pairs of reader and pickle", len(readers) * len(paths))


@pytest.mark.parametrize("library", ("timm", "open_clip"))
def test_encoder_weights_are_read_as_tensors_only(tmp_path, monkeypatch, library):
    "Even where a library asks torch for everything."
    mark, paths = planted(tmp_path)
    monkeypatch.setitem(
        encoders.ENCODER_LIBRARIES,
        library,
        lambda model, tag, weights, **options: torch.load(weights, weights_only=False),
    )
    name = {"timm": "timm:vit", "open_clip": "open_clip:ViT-B-32:x"}[library]
    with pytest.raises(InputError, match="expected weights"):
        encoders.load_encoder(name, weights=str(paths["weights.pt"]))
    assert not mark.exists() and "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_pickled_datasets_are_checked_by_hash_first(tmp_path, monkeypatch):
    "CIFAR comes as pickles; torchvision reads them only when their MD5 is the known one."
    datasets.patch_torchvision()
    pytest.importorskip("torchvision")
    mark, _ = planted(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in ("test_batch", "batches.meta", *(f"data_batch_{i}" for i in range(1, 6))):
        (folder / name).write_bytes(pickle.dumps(Payload(mark)))
    with pytest.raises(InputError):
        datasets.open_dataset("cifar10", tmp_path, download=False)
    assert not mark.exists()


def calls(source):
    "Names of what a module calls, and keywords with their values."
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}


def complaints(source):
    "Calls that execute a text or unpickle a file."
    bad = {
        "eval",
        "exec",
        "compile",
        "os.system",
        "os.popen",
        "pickle.load",
        "pickle.loads",
        "pd.read_pickle",
        "joblib.load",
        "yaml.load",
        "marshal.loads",
        "np.load",
        "numpy.load",
        "torch.jit.load",
        "subprocess.getoutput",
    }
    for name, how in calls(source):
        if (
            name in bad
            or how.get("shell") not in (None, "False")
            or how.get("allow_pickle") not in (None, "False")
            or how.get("trust_remote_code") not in (None, "False")
        ):
            yield f"{name}({how})"
        if name == "torch.load" and how.get("weights_only") != "True":
            yield f"{name}({how})"


def test_no_module_calls_eval_exec_or_pickle():
    "Losses of a user travel to the workers of the same user as pickles."
    known = {"losses.py": ["pickle.loads({})"]}
    modules = sorted((HERE.parents[1] / "ega").rglob("*.py"))
    assert len(modules) > 30
    for path in modules:
        assert list(complaints(path.read_text())) == known.get(path.name, []), path.name
    for line in (
        "os.system('x')",
        "subprocess.run('x', shell=True)",
        "torch.load(p)",
        "np.load(p)",
        "np.load(p, allow_pickle=True)",
        "pickle.load(f)",
        "eval('1')",
    ):
        assert list(complaints(line)), line


# -- names that lead elsewhere ---------------------------------------------------------------------------------


def test_onnx_reads_no_weights_outside_its_folder(tmp_path):
    "ONNX may keep weights in other files; a name that climbs, or is absolute, is refused."
    (tmp_path / "secret").write_bytes(np.zeros(72, "f4").tobytes())
    (tmp_path / "m").mkdir()
    for name in ("../secret", str(tmp_path / "secret"), "/etc/hostname"):
        (tmp_path / "m" / "e.onnx").write_bytes(onnx_file(tmp_path, external=name))
        with pytest.raises(InputError, match="cannot load"):
            encoders.OnnxImageEncoder(
                tmp_path / "m" / "e.onnx", preprocess=encoders.ImagePreprocessing(resize=8, crop=8)
            )


@pytest.mark.parametrize("name", ("../secret.png", "a/../../secret.png", "{root}/secret.png"))
def test_csv_reads_no_images_outside_its_folder(tmp_path, name):
    (tmp_path / "t").mkdir()
    (tmp_path / "secret.png").write_bytes(png((1, 2, 3)))
    (tmp_path / "t" / "t.csv").write_text(f"image,label\n{name.format(root=tmp_path)},a\n")
    with pytest.raises(InputError, match="in the folder of this file or below"):
        datasets.read_csv_source(tmp_path / "t" / "t.csv")


@pytest.mark.parametrize(
    "key, value",
    (("index", "../i.faiss"), ("ids", "/etc/hostname"), ("fingerprint", "../../elsewhere"), ("index", "..")),
)
def test_index_reads_no_file_outside_its_folder(tmp_path, key, value):
    from ega.deploy.index import AdaptedIndex
    from ega.deploy.stores import IndexStore

    AdaptedIndex(np.eye(6, dtype="f4")).add(rows()).save(tmp_path / "s" / "v")
    about = json.loads((tmp_path / "s" / "v" / "about.json").read_text())
    (tmp_path / "s" / "v" / "about.json").write_text(json.dumps(about | {key: value}))
    with pytest.raises(InputError):
        AdaptedIndex.load(tmp_path / "s" / "v")
    (tmp_path / "s" / "current.json").write_text('{"version": "../s/v"}')
    with pytest.raises(InputError):
        IndexStore(tmp_path / "s").open()


@pytest.mark.parametrize("ending", (".part", ".part.json", ".part.tmp", ".part.json.part.tmp", ""))
def test_symlinks_beside_a_target_are_not_followed(tmp_path, ending):
    "In a folder that others may write to, a link under the name of a temporary file must not lead the write elsewhere."
    from ega.deploy.transform import transform_file

    np.save(tmp_path / "x.npy", rows())
    (tmp_path / "mine").write_text("precious")
    (tmp_path / f"z.npy{ending}").symlink_to(tmp_path / "mine")
    try:
        transform_file(LinearAdapter(6), tmp_path / "x.npy", tmp_path / "z.npy", device="cpu", threads=1)
    except InputError:
        pass
    assert (tmp_path / "mine").read_text() == "precious"
    with atomic_write(tmp_path / f"z.npy{ending}") as t:
        t.write_text("new")
    assert (tmp_path / "mine").read_text() == "precious" and not (tmp_path / f"z.npy{ending}").is_symlink()


def test_temporary_files_are_private_and_removed(tmp_path):
    (tmp_path / "usual").write_text("x")
    with atomic_write(tmp_path / "a") as file:
        assert file.stat().st_mode & 0o777 == 0o600
    (tmp_path / "mine").mkdir(mode=0o750)
    with atomic_folder(tmp_path / "mine") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o750
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "mine", "usual"]


# -- the command line ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, code",
    (
        (InputError("x"), 2),
        (OSError(28, "No space left on device"), 1),
        (RuntimeError("a\nb"), 1),
        (MemoryError("9 GB"), 1),
        (FloatingPointError("x"), 1),
        (OverflowError("x"), 1),
        (RecursionError("x"), 1),
        (KeyboardInterrupt(), 130),
    ),
)
def test_errors_are_printed_as_one_line(monkeypatch, capsys, error, code):
    def fails(args):
        raise error

    monkeypatch.setattr(cli, "_check_info", fails)
    assert cli.main(["info", "x"]) == code
    said = capsys.readouterr().err
    assert said.startswith("ega: ") and len(said.strip().splitlines()) == 1
