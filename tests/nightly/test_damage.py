"Every kind of file with thousands of damages: refused in one sentence, in bounded time and memory, or read as it is."

import io
import itertools
import json
import multiprocessing
import random
import resource
import struct
import zipfile

import numpy as np
import pyarrow.parquet as pq
import pytest
from readers import READERS, D, N, Payload, files_in, rows, write_pack

from ega.data import packs
from ega.data.arrays import InputError

SECONDS, ROOM = 900, 6 * 2**30  # of all damages of one file; address space beyond that of the start
WORDS = (None, True, -1, 1.5, 10**30, "../../x", "", [], {}, [[1], 2], float("nan"))


def spoiled(value, depth=3):
    "Every variant of a JSON value with one part exchanged for something of another kind or left out."
    yield from WORDS
    if depth and isinstance(value, dict):
        for key in value:
            yield {k: v for k, v in value.items() if k != key}
            yield from (value | {key: part} for part in spoiled(value[key], depth - 1))
    if depth and isinstance(value, list) and value:
        yield value[1:]
        yield from ([part, *value[1:]] for part in spoiled(value[0], depth - 1))


def hostile_json(good, mark):
    yield from (json.dumps(value).encode() for value in spoiled(json.loads(good)))
    yield from (b"[" * 10**5, b'{"a": ' + b"9" * 9999 + b"}", good.decode().encode("utf-16"), bytes(100))


def hostile_npy(good, mark):
    "Headers that lie."

    def header(shape, descr="'<f4'", order="False"):
        text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
        text += b" " * (-(10 + len(text) + 1) % 64) + b"\n"
        return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + rows().tobytes()

    for shape in (f"({2**62}, 6)", f"({2**33}, {2**33})", "(10**9, 6)", "(-60, 6)", "()", "(60., 6)", "(n, 6)"):
        yield header(shape)
    for descr in ("'|O'", "__import__('os').abort()", "[('a', '<f4', (6,))]", f"'<U{2**28}'", "'<m8[s]'", "'|V4'"):
        yield header("(60, 6)", descr)
    yield header("(60, 6)", order="7")
    yield b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + good[10:]
    np.save(f := io.BytesIO(), np.array([Payload(mark)], object), allow_pickle=True)
    yield f.getvalue()


def hostile_npz(good, mark):
    with zipfile.ZipFile(io.BytesIO(good)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    changes = [{name: content} for name in members for content in hostile_npy(members[name], mark)]
    for change in [*changes, {"../../MARK": b"1"}]:
        with zipfile.ZipFile(f := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in (members | change).items():
                archive.writestr(name, content)
        yield f.getvalue()


def hostile_safetensors(good, mark):
    n = int.from_bytes(good[:8], "little")
    head, body = json.loads(good[8 : 8 + n]), good[8 + n :]
    texts = [json.dumps(value).encode() for value in spoiled(head)] + [b"[" * 10**5, b"{'a': 1}"]
    if "ega" in head.get("__metadata__", {}):
        about = json.loads(head["__metadata__"]["ega"])
        texts += [json.dumps(head | {"__metadata__": {"ega": json.dumps(v)}}).encode() for v in spoiled(about)]
    yield from (struct.pack("<Q", len(text)) + text + body for text in texts)
    yield from (struct.pack("<Q", length) + good[8:] for length in (0, 1, 2**20, 2**31, 2**62, 2**64 - 1))


def hostile_parquet(good, mark):
    table = pq.read_table(io.BytesIO(good))
    changed = [table[:0], *(table.drop_columns([name]) for name in table.schema.names)]
    if b"ega" in (table.schema.metadata or {}):
        about = json.loads(table.schema.metadata[b"ega"])
        changed += [table.replace_schema_metadata({"ega": json.dumps(value)}) for value in spoiled(about, 2)]
    for each in changed:
        pq.write_table(each, f := io.BytesIO())
        yield f.getvalue()


def random_damages(good, n=300):
    "Bits anywhere, in the first 64 and in the last 256 bytes, and stretches of zeros and ones."
    rng, size = random.Random(0), len(good)
    for i in range(n):
        at = (rng.randrange(size), rng.randrange(min(size, 64)), size - 1 - rng.randrange(min(size, 256)))[i % 3]
        yield good[:at] + bytes([good[at] ^ 1 << rng.randrange(8)]) + good[at + 1 :]
    for i in range(n // 5):
        at = rng.randrange(size)
        yield good[:at] + (b"\0", b"\xff")[i % 2] * 16 + good[at + 16 :]


HOSTILE = {
    "json": hostile_json,
    "npy": hostile_npy,
    "npz": hostile_npz,
    "safetensors": hostile_safetensors,
    "parquet": hostile_parquet,
}


def damage_all(name, folder, told):
    "In a process of its own: say each damage before it is read, and what is wrong with the outcome, if anything."
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM,) * 2)
    write, read, is_hashed = READERS[name]
    write(folder)
    mark, expected = folder.parent / "MARK", read(folder)
    for file, good in files_in(folder).items():
        make = HOSTILE.get(file.rpartition(".")[2], lambda good, mark: [])
        for i, content in enumerate(itertools.chain(make(good, mark), random_damages(good))):
            told.send(f"{file}, damage {i}")
            (folder / file).write_bytes(content)
            try:
                if read(folder) != expected and is_hashed:
                    told.send("error: changed and not refused")
            except InputError as error:
                if "\n" in str(error) or isinstance(error.__cause__, MemoryError):
                    told.send(f"error: {error}")
            except BaseException as error:
                told.send(f"error: {type(error).__name__}: {error}")
            if mark.exists():
                told.send("error: it was unpickled")
        (folder / file).write_bytes(good)
    told.send("end")


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_refused(tmp_path, name):
    (folder := tmp_path / "here").mkdir()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=damage_all, args=(name, folder, sender))
    process.start()
    sender.close()
    last, errors = "", []
    while last != "end":
        assert receiver.poll(SECONDS), f"no end of {last}"
        try:
            said = receiver.recv()
        except EOFError:
            process.join()
            pytest.fail(f"exit code {process.exitcode} after {last}")
        if said.startswith("error"):
            errors.append(f"{last}: {said}")
        else:
            last = said
    process.join()
    assert not errors, errors[:5]


def test_damaged_column_metadata_is_refused(tmp_path):
    "Reading a field of it makes pyarrow 26.0.1 abort, so each bit of it is flipped in a process of its own."
    write_pack(tmp_path)
    good, expected = (tmp_path / "p.parquet").read_bytes(), packs.read_pack(tmp_path / "p.parquet").x
    end = good.index(b"ARROW:schema", len(good) - 8 - int.from_bytes(good[-8:-4], "little"))

    def flip(bits):
        for bit in bits:
            damaged = bytearray(good)
            damaged[bit // 8] ^= 1 << bit % 8
            (tmp_path / f"{bits[0]}.parquet").write_bytes(damaged)
            try:
                assert np.array_equal(packs.read_pack(tmp_path / f"{bits[0]}.parquet").x, expected)
            except InputError:
                pass

    for first in range((end - 400) * 8, end * 8, 64):
        process = multiprocessing.get_context("fork").Process(target=flip, args=(range(first, first + 64),))
        process.start()
        process.join(60)
        assert process.exitcode == 0, f"bits from {first}"


assert (N, D) == (60, 6)  # what the headers above say
