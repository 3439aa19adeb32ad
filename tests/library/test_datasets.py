"Sources: folders, archives, .csv files, and miniature public sets with the file layout of the real ones."

import hashlib
import json
import pickle
import shutil
import socket
import sys
import zipfile

import numpy as np
import pytest
from test_embed import QUIET, BlockEncoder, LetterCounts, needs, photos, picture

from ega.data.arrays import InputError
from ega.data.datasets import (
    DATASETS,
    _unpack,
    open_dataset,
    open_input_source,
    read_clinc,
    read_csv_source,
    read_image_folder,
)
from ega.data.embed import embed
from ega.data.packs import read_pack

# -- sources -----------------------------------------------------------------------------------------------


def test_image_folder_flat_nested_and_with_splits(tmp_path):
    flat = photos(tmp_path / "flat", 4, ("",))
    (flat / ".hidden.png").write_bytes(b"")
    (flat / "notes.txt").write_text("")
    s = read_image_folder(flat)
    assert len(s) == 4 and s.y.tolist() == [-1] * 4 and s.classes == () and s.name == "flat"
    assert read_pack(embed(flat, BlockEncoder(), tmp_path, **QUIET).path).y.tolist() == [-1] * 4
    s = read_image_folder(photos(tmp_path / "split", 6, ("train/cat", "test/dog", "val/cat")))
    assert s.classes == ("cat", "dog")
    assert set(zip(s.split, s.y.tolist())) == {("test", 1), ("train", 0), ("val", 0)}
    s = read_image_folder(photos(tmp_path / "deep", 4, ("cat/x", "dog/y/z")))
    assert s.classes == ("cat", "dog") and s.ids == sorted(s.ids)
    assert s.read(0) == (tmp_path / "deep" / s.ids[0]).read_bytes()


def archive(path, n=5, **changes):
    raw = [picture(i) for i in range(n)]
    a = dict(
        data=np.frombuffer(b"".join(raw), np.uint8),
        offsets=np.cumsum([0] + [len(r) for r in raw]),
        labels=np.arange(n) % 2,
        names=np.array(["x", "y"]),
        ids=np.array([f"i{i}" for i in range(n)]),
        split=np.array(["test"] * n),
    )
    np.savez(path, **{k: v for k, v in (a | changes).items() if v is not None})
    return path, raw


def test_image_archive(tmp_path):
    path, raw = archive(tmp_path / "own.npz")
    s = open_input_source(path)
    assert [s.read(i) for i in range(5)] == raw and s.y.tolist() == [0, 1, 0, 1, 0]
    assert s.split == ["test"] * 5 and s.classes == ("x", "y") and s.name == "own"


def test_table_of_texts(tmp_path):
    path = tmp_path / "t.csv"
    header = "\ufefftext,label,split,id\n"  # with a byte order mark
    rows = '"one, two",zwei,train,r1\n"line\nbreak",eins,test,r2\nthrée,,,r3\n  ,eins,train,r4\n'
    path.write_bytes((header + rows).encode())
    s = read_csv_source(path)
    assert [s.read(i) for i in range(3)] == ["one, two", "line\nbreak", "thrée"]
    assert s.classes == ("eins", "zwei") and s.y.tolist() == [1, 0, -1, 0]
    done = embed(path, LetterCounts(), tmp_path, on_error="skip", **QUIET)
    es = read_pack(done.path)
    assert es.ids.tolist() == ["r1", "r2", "r3"] and es.split.tolist() == ["train", "test", ""]
    assert list(done.skipped) == ["r4"]
    path.write_text("text\na\n\nb\n")  # an empty line is an empty text
    assert read_csv_source(path).ids == ["0", "1", "2"] and read_csv_source(path).y.tolist() == [-1, -1, -1]
    path.write_text("text;label\na;3.0\nb;\nc;10.0\nd;NA\ne;3.0\n")  # integers with blanks
    assert read_csv_source(path).classes == ("10", "3") and read_csv_source(path).y.tolist() == [1, -1, 0, -1, 1]
    path.write_text("text,label\na,none\nb,\nc,owl\n")  # `ega fit` asks about the class "none"
    assert read_csv_source(path).classes == ("none", "owl")


def test_table_of_images(tmp_path):
    photos(tmp_path / "p", 3, ("x",))
    (tmp_path / "t.csv").write_text("image,label,split\np/x/000.png,b,train\np/x/001.png,a,test\np/x/002.png,,\n")
    s = open_input_source(tmp_path / "t.csv")
    assert s.modality == "image" and s.y.tolist() == [1, 0, -1] and s.ids[0] == "p/x/000.png"
    assert s.read(1) == (tmp_path / "p/x/001.png").read_bytes()
    (tmp_path / "p/x/001.png").unlink()
    with pytest.raises(InputError, match="1 of 3 files"):
        open_input_source(tmp_path / "t.csv")


def test_clinc_order_with_out_of_scope_rows_last(tmp_path):
    intents = {
        "oos_val": [["q", "oos"]],
        "val": [["v", "b"]],
        "train": [["t1", "b"], ["t0", "a"]],
        "oos_test": [["u", "oos"]],
        "test": [["e", "a"]],
        "oos_train": [["p", "oos"]],
    }
    (tmp_path / "c.json").write_text(json.dumps(intents))
    s = read_clinc(tmp_path / "c.json")
    assert s.items == ["t1", "t0", "v", "e", "p", "q", "u"] and s.y.tolist() == [1, 0, 1, 0, -1, -1, -1]
    assert s.split == ["train", "train", "val", "test", "oos_train", "oos_val", "oos_test"]
    assert s.classes == ("a", "b") and s.ids[1] == "train_00001"


def test_fingerprint_depends_on_content_labels_and_splits(tmp_path):
    rows = ["a,x,train\nb,y,train", "a,x,train\nc,y,train", "a,x,train\nb,x,train", "a,x,train\nb,y,test"]
    found = []
    for text in [*rows, "a,x,train\nb,z,train", rows[0]]:
        (tmp_path / "t.csv").write_text(f"text,label,split\n{text}\n")
        found.append(read_csv_source(tmp_path / "t.csv").fingerprint)
    assert len(set(found)) == 5 and found[0] == found[5]


WRONG_FILES = {
    "no_rows.csv": b"text\n",
    "no_column.csv": b"words\nhello\n",
    "not_utf8.csv": b"text\n\xff\xfe\n",
    "fractions.csv": b"text,label\na,0.5\nb,1.25\n",
    "booleans.csv": b"text,label\na,True\nb,False\n",
    "list.json": b"[]",
    "cut.json": b"{",
    "one_text.json": b'{"train": [["x"]]}',
    "other_split.json": b'{"others": [["x", "y"]]}',
    "text.npz": b"hello",
    "file.txt": b"hello",
}


@pytest.mark.parametrize("name", [*WRONG_FILES, "none.json", "empty"])
def test_wrong_files(name, tmp_path):
    (tmp_path / "empty").mkdir()
    if name in WRONG_FILES:
        (tmp_path / name).write_bytes(WRONG_FILES[name])
    with pytest.raises(InputError):
        open_input_source(tmp_path / name)


@pytest.mark.parametrize("changes", [dict(offsets=None), dict(ids=np.array(["a"])), dict(labels=np.ones(5))])
def test_wrong_archives(changes, tmp_path):
    with pytest.raises(InputError, match="bad.npz"):
        open_input_source(archive(tmp_path / "bad.npz", **changes)[0])


# -- public sets in miniature ------------------------------------------------------------------------------


def write_files(root, files):
    "Write files: texts, bytes, or for a number the random image of that seed."
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = picture(content, kind="JPEG") if isinstance(content, int) else content
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def open_miniature(name, root, **options):
    "Open a set without a download and without checking its number of rows."
    return open_dataset(name, root, download=False, check_rows=False, **options)


@pytest.mark.parametrize("name,key,labels", [("cifar10", "CIFAR10", "labels"), ("cifar100", "CIFAR100", "fine_labels")])
def test_cifar(name, key, labels, tmp_path, monkeypatch):
    needs("torchvision")
    import torchvision

    make = getattr(torchvision.datasets, key)
    data = np.random.default_rng(0).integers(0, 256, (4, 3072), np.uint8)
    test, meta = pickle.dumps({"data": data, labels: [3, 0, 3, 1]}), pickle.dumps({make.meta["key"]: list("abcd")})
    files = {make.test_list[0][0]: test, make.meta["filename"]: meta} | {f: test for f, _ in make.train_list}
    write_files(tmp_path / make.base_folder, files)
    sums = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    for part in ("test_list", "train_list"):
        monkeypatch.setattr(make, part, [[f, sums[f]] for f, _ in getattr(make, part)])
    monkeypatch.setattr(make, "meta", make.meta | {"md5": sums[make.meta["filename"]]})
    s = open_miniature(name, tmp_path)
    assert s.classes == ("a", "b", "c", "d") and s.y.tolist() == [3, 0, 3, 1] and s.name == name
    assert s.ids == [f"test_{i:05d}" for i in range(4)]
    assert np.array_equal(s.read(2), data[2].reshape(3, 32, 32).transpose(1, 2, 0))
    es = read_pack(embed(s, BlockEncoder(), tmp_path, **QUIET).path)
    assert es.n == 4 and es.meta["licence"] and es.split.tolist() == ["test"] * 4
    both = open_miniature(name, tmp_path, splits=["train", "test"])
    assert both.name == f"{name}_train_test" and both.split.count("train") == 4 * len(make.train_list)
    assert both.fingerprint != s.fingerprint
    (tmp_path / make.base_folder / make.test_list[0][0]).write_bytes(test[:-9])
    with pytest.raises(InputError, match="corrupted"):
        open_miniature(name, tmp_path)


def test_cars_and_flowers(tmp_path, monkeypatch):
    needs("torchvision", "scipy")
    import torchvision
    from scipy.io import savemat

    c = tmp_path / "stanford_cars"
    write_files(c, {"cars_train/00001.jpg": 1, "cars_test/00001.jpg": 2, "devkit/x": ""})

    def save_labels(path, *labels):
        fields = [("fname", object), ("class", object)]
        savemat(path, {"annotations": np.array([("00001.jpg", label) for label in labels], dtype=fields)})

    save_labels(c / "devkit/cars_train_annos.mat", 2, 1)
    save_labels(c / "cars_test_annos_withlabels.mat", 1, 1)
    savemat(c / "devkit/cars_meta.mat", {"class_names": np.array(["Acura", "BMW"], dtype=object)})
    s = open_miniature("cars", tmp_path)
    assert s.classes == ("Acura", "BMW") and s.y.tolist() == [1, 0, 0, 0]
    assert s.ids[2] == "stanford_cars/cars_test/00001.jpg"

    d = tmp_path / "flowers-102"
    write_files(d, {f"jpg/image_0000{i}.jpg": i for i in (1, 2, 3)})
    savemat(d / "imagelabels.mat", {"labels": np.array([[2, 1, 2]])})
    savemat(d / "setid.mat", {"trnid": [[1, 2]], "valid": [[3, 3]], "tstid": [[2, 3]]})
    sums = {
        k: (f, None if k == "image" else hashlib.md5((d / f).read_bytes()).hexdigest())
        for k, (f, _) in torchvision.datasets.Flowers102._file_dict.items()
    }
    monkeypatch.setattr(torchvision.datasets.Flowers102, "_file_dict", sums)
    s = open_miniature("flowers102", tmp_path, splits=["train"])
    assert s.y.tolist() == [1, 0] and s.ids[0] == "flowers-102/jpg/image_00001.jpg"
    assert s.classes[0] == "pink primrose" and len(s.classes) == 102


def below(folder, files):
    return {f"{folder}/{name}": content for name, content in files.items()}


GROCERY = {
    "classes.csv": "Class Name (str),Class ID (int),Coarse Class Name (str)\nPink-Lady,1,Apple\nGolden,0,Apple\n",
    "train.txt": "train/Fruit/Apple/g.jpg, 0, 0\n",
    "val.txt": "val/p.jpg, 1, 0\n",
    "test.txt": "test/p.jpg, 1, 0\n",
} | {"train/Fruit/Apple/g.jpg": 1, "val/p.jpg": 2, "test/p.jpg": 3}
CUB = {
    "images.txt": "1 002.B/x.jpg\n2 001.A/y.jpg\n3 001.A/z.jpg\n",
    "image_class_labels.txt": "1 2\n2 1\n3 1\n",
    "train_test_split.txt": "1 0\n2 1\n3 0\n",
    "classes.txt": "1 001.A\n2 002.B\n",
} | {"images/002.B/x.jpg": 1, "images/001.A/y.jpg": 2, "images/001.A/z.jpg": 3}
TINY = {
    "words.txt": "n01\tgoldfish, Carassius\nn02\ttailed frog, bell toad\nn03\tother\n",
    "val/val_annotations.txt": "val_0.JPEG\tn02\t0\t9\t9\nval_1.JPEG\tn01\t0\t9\t9\n",
} | {"val/images/val_0.JPEG": 1, "val/images/val_1.JPEG": 2, "train/n01/images/n01_0.JPEG": 3}
CLINC = {"data_full.json": json.dumps({"val": [["v", "a"]], "train": [["t", "b"]], "oos_test": [["u", "oos"]]})}
BANKING = {
    "train.csv": 'text,category\n"one, two",lost\nthree,card\n',
    "test.csv": "text,category\nfour,card\n",
}
AIRCRAFT = {  # its classes keep the order of their file
    "variants.txt": "747-100\n707-320\n",
    "images_variant_test.txt": "0001 707-320\n0002 747-100\n",
} | {"images/0001.jpg": 1, "images/0002.jpg": 2}
FOOD = {"meta/test.json": json.dumps({"waffles": ["waffles/1"], "pho": ["pho/2"]})} | {
    f"images/{name}.jpg": 1 for name in ("waffles/1", "pho/2")
}
PET = {
    "annotations/trainval.txt": "Abyssinian_1 1 1 1\nbeagle_7 2 2 1\n",
    "annotations/test.txt": "beagle_9 2 2 1\nAbyssinian_4 1 1 1\n",
} | {f"images/{name}.jpg": 1 for name in ("Abyssinian_1", "beagle_7", "beagle_9", "Abyssinian_4")}
MINIATURES = {  # files, classes, labels, splits
    "aircraft": (below("fgvc-aircraft-2013b/data", AIRCRAFT), ("747-100", "707-320"), [1, 0], ["test", "test"]),
    "food101": (below("food-101", FOOD), ("pho", "waffles"), [1, 0], ["test", "test"]),
    "pet": (below("oxford-iiit-pet", PET), ("Abyssinian", "Beagle"), [0, 1, 1, 0], ["trainval"] * 2 + ["test"] * 2),
    "grocery": (
        below("GroceryStoreDataset-fc80ba90f803d79d0383df52c5a4ac5de99ff6fc/dataset", GROCERY),
        ("Golden", "Pink-Lady"),
        [0, 1, 1],
        ["train", "val", "test"],
    ),
    "cub200": (below("CUB_200_2011", CUB), ("A", "B"), [1, 0, 0], ["test", "train", "test"]),
    "tiny_imagenet": (below("tiny-imagenet-200", TINY), ("n01 goldfish", "n02 tailed frog"), [1, 0], ["val", "val"]),
    "clinc150": (CLINC, ("a", "b"), [1, 0, -1], ["train", "val", "oos_test"]),
    "banking77": (below("banking77", BANKING), ("card", "lost"), [1, 0, 0], ["train", "train", "test"]),
}


@pytest.mark.parametrize("name", MINIATURES)
def test_miniatures(name, tmp_path):
    if name in ("aircraft", "food101", "pet"):
        needs("torchvision")
    files, classes, labels, splits = MINIATURES[name]
    write_files(tmp_path, files)
    s = open_miniature(name.replace("_", "-"), tmp_path)
    assert (s.classes, s.y.tolist(), s.split) == (classes, labels, splits)
    assert s.meta["source"] and s.meta["licence"] and all(map(s.read, range(len(s))))
    with pytest.raises(InputError, match=f"expected {DATASETS[name].rows} rows"):
        open_dataset(name, tmp_path, download=False)


def test_imagenet_samples_35_rows_per_class(tmp_path):
    write_files(tmp_path, {f"train/n0{c}/n0{c}_{i}.JPEG": b"x" for c in (1, 2) for i in range(40)})
    s, again, other = (open_dataset("imagenet", tmp_path, seed=seed) for seed in (42, 42, 7))
    assert np.bincount(s.y).tolist() == [35, 35] and s.classes == ("n01", "n02")
    assert s.ids == sorted(s.ids) == again.ids != other.ids and "35 rows per class by seed 42" in s.meta["notes"]
    few = open_dataset("imagenet", tmp_path / "train", per_class=3)  # the class folders themselves
    rng, files = np.random.default_rng(42), sorted((tmp_path / "train").glob("*/*"))
    sampled = [rng.permutation(range(40 * c, 40 * c + 40))[:3] for c in (0, 1)]
    assert few.items == [files[i] for i in np.sort(np.concatenate(sampled))]


@pytest.mark.parametrize("name", DATASETS)
def test_an_unreachable_set_says_what_to_do(name, tmp_path, monkeypatch):
    needs("torchvision", "scipy")

    def no_network(*a, **k):
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    with pytest.raises(InputError, match=f"{name}: expected its files in") as error:
        open_dataset(name, tmp_path)
    assert "\n" not in str(error.value)
    assert not any(p.is_file() for p in tmp_path.rglob("*"))  # an incomplete file could be taken for a complete one


def test_an_archive_is_downloaded_once_and_checked(tmp_path):
    "With and without a checksum; a wrong checksum or an incomplete archive leaves no folder behind."
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as z:
        z.writestr("top/x.txt", "hello")
        z.writestr("beside.txt", "")
    whole, url = archive.read_bytes(), archive.as_uri()
    for sha256 in (hashlib.sha256(whole).hexdigest(), None):
        top = tmp_path / f"root{sha256}" / "top"
        assert (_unpack(top, True, url, sha256) / "x.txt").read_text() == "hello"
        assert _unpack(top, True, "file:///nowhere.zip", sha256) == top and list(top.parent.iterdir()) == [top]
    assert not _unpack(tmp_path / "bad" / "top", False, url).exists()
    with pytest.raises(RuntimeError, match="hash"):
        _unpack(tmp_path / "bad" / "top", True, url, "0" * 64)
    assert not list((tmp_path / "bad").iterdir())
    archive.write_bytes(whole[:30])
    with pytest.raises(shutil.ReadError):
        _unpack(tmp_path / "half" / "top", True, url)
    assert not (tmp_path / "half" / "top").exists()


def test_dataset_specs():
    assert len(DATASETS) == 13 and all(set(c.default) <= set(c.splits) for c in DATASETS.values())
    published = {"cifar100": 10_000, "cifar10": 10_000, "aircraft": 3_333, "food101": 25_250, "pet": 7_349}
    assert {k: DATASETS[k].rows for k in published} == published and DATASETS["imagenet"].per_class == 35
    for name, options in (("mnist", {}), ("food101", dict(splits=["val"]))):
        with pytest.raises(InputError):
            open_dataset(name, **options)


def test_missing_torchvision_names_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(ImportError, match=r"ega\[encoders\]"):
        open_dataset("cifar10", tmp_path)
