"Sources: folders, archives, .csv files, and miniature public sets with the file layout of the real ones."

import hashlib
import http.server
import importlib.util
import io
import json
import pickle
import sys
import threading
import types
import warnings
import zipfile

import numpy as np
import pytest
from test_embed import QUIET, BlockEncoder, LetterCounts, photos, picture

from ega.data.arrays import InputError
from ega.data.datasets import (
    DATASETS,
    _fetch,
    _unpack,
    open_dataset,
    open_input_source,
    patch_torchvision,
    read_clinc,
    read_csv_source,
    read_image_archive,
    read_image_folder,
    released_class_split,
    sample_per_class,
)
from ega.data.embed import embed
from ega.data.packs import read_pack

Image = pytest.importorskip("PIL.Image")


# -- sources -----------------------------------------------------------------------------------------------


def test_image_folder_flat_nested_and_with_splits(tmp_path):
    flat = photos(tmp_path / "flat", 4, ("",))
    (flat / ".hidden.png").write_bytes(b"")
    (flat / "notes.txt").write_text("")
    s = read_image_folder(flat)
    assert len(s) == 4 and s.y.tolist() == [-1] * 4 and s.classes == () and s.name == "flat"
    assert read_pack(embed(flat, BlockEncoder(), tmp_path, **QUIET).path).y.tolist() == [-1] * 4
    s = read_image_folder(photos(tmp_path / "split", 6, ("train/cat", "test/dog", "val/cat")))
    assert s.classes == ("cat", "dog") and sorted(set(zip(s.split, s.y.tolist()))) == [
        ("test", 1),
        ("train", 0),
        ("val", 0),
    ]
    s = read_image_folder(photos(tmp_path / "deep", 4, ("cat/x", "dog/y/z")))
    assert (
        s.classes == ("cat", "dog")
        and s.ids == sorted(s.ids)
        and s.read(0) == (tmp_path / "deep" / s.ids[0]).read_bytes()
    )
    with pytest.raises(InputError, match="no images found"):
        read_image_folder(tmp_path / "split" / "train" / ".." / "nothing")


def archive(path, n=5, **changes):
    raw = [picture(i) for i in range(n)]
    a = (
        dict(
            data=np.frombuffer(b"".join(raw), np.uint8),
            offsets=np.cumsum([0] + [len(r) for r in raw]),
            labels=np.arange(n) % 2,
            names=np.array(["x", "y"]),
            ids=np.array([f"i{i}" for i in range(n)]),
            split=np.array(["test"] * n),
        )
        | changes
    )
    np.savez(path, **{k: v for k, v in a.items() if v is not None})
    return path, raw


def test_image_archive(tmp_path):
    path, raw = archive(tmp_path / "own.npz")
    s = open_input_source(path)
    assert (
        [s.read(i) for i in range(5)] == raw
        and s.y.tolist() == [0, 1, 0, 1, 0]
        and s.split == ["test"] * 5
        and s.name == "own"
    )
    other, _ = archive(tmp_path / "other.npz", labels=np.zeros(5, int))
    assert s.fingerprint != open_input_source(other).fingerprint
    assert read_image_archive(archive(tmp_path / "cub100.npz")[0]).meta["licence"].startswith("non-commercial")
    for changes in (dict(offsets=None), dict(offsets=np.arange(6)), dict(ids=np.array(["a"]))):
        with pytest.raises(InputError, match="bad.npz"):
            read_image_archive(archive(tmp_path / "bad.npz", **changes)[0])
    with pytest.raises(InputError, match="unique"):
        embed(archive(tmp_path / "twice.npz", ids=np.array(["a"] * 5))[0], BlockEncoder(), tmp_path, **QUIET)


def test_csv_of_texts(tmp_path):
    path = tmp_path / "t.csv"
    header = "\ufefftext,label,split,id\n"  # with a byte order mark
    rows = '"one, two",zwei,train,r1\n"line\nbreak",eins,test,r2\nthrée,,,r3\n  ,eins,train,r4\n'
    path.write_bytes((header + rows).encode())
    s = read_csv_source(path)
    assert (
        [s.read(i) for i in range(3)] == ["one, two", "line\nbreak", "thrée"]
        and s.classes == ("eins", "zwei")
        and s.y.tolist() == [1, 0, -1, 0]
    )
    done = embed(path, LetterCounts(), tmp_path, on_error="skip", **QUIET)
    es = read_pack(done.path)
    assert (
        es.ids.tolist() == ["r1", "r2", "r3"]
        and es.split.tolist() == ["train", "test", ""]
        and list(done.skipped) == ["r4"]
    )
    path.write_text("text\na\nb\n")
    assert read_csv_source(path).ids == ["0", "1"] and read_csv_source(path).y.tolist() == [-1, -1]
    for content in (b"", b"text\n", b"words\nhello\n", b"text\n\xff\xfe\n"):
        path.write_bytes(content)
        with pytest.raises(InputError, match="t.csv"):
            read_csv_source(path)


@pytest.mark.parametrize(
    "labels, words", [(("0.5", "1.25", "1"), "got 0.5; if such"), (("True", "", "False"), "Booleans")]
)
def test_labels_of_a_csv_of_texts_that_are_no_classes_are_refused_as_in_python(labels, words, tmp_path):
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"words,{label}\n" for label in labels))
    with pytest.raises(InputError, match=words):
        read_csv_source(tmp_path / "t.csv")


def test_clinc_order_with_out_of_scope_rows_last(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(
        json.dumps(
            {
                "oos_val": [["q", "oos"]],
                "val": [["v", "b"]],
                "train": [["t1", "b"], ["t0", "a"]],
                "oos_test": [["u", "oos"]],
                "test": [["e", "a"]],
                "oos_train": [["p", "oos"]],
            }
        )
    )
    s = read_clinc(path)
    assert (
        [s.read(i) for i in range(len(s))] == ["t1", "t0", "v", "e", "p", "q", "u"]
        and s.y.tolist() == [1, 0, 1, 0, -1, -1, -1]
        and s.classes == ("a", "b")
    )
    assert (
        s.split == ["train", "train", "val", "test", "oos_train", "oos_val", "oos_test"] and s.ids[1] == "train_00001"
    )
    for content in ("[]", "{", '{"train": [["x"]]}', '{"others": [["x", "y"]]}', '{"train": 3}'):
        path.write_text(content)
        with pytest.raises(InputError, match="c.json"):
            read_clinc(path)
    for name in ("none.json", "file.txt"):
        with pytest.raises(InputError, match="expected a folder of images, an image, or a file ending in"):
            open_input_source(tmp_path / name)


@pytest.mark.parametrize(
    "text, row", [("text\nhello there\n\nbye\n", 1), ("text\nhello\n\n", 1), ("text,label\na,b\n,c\n", 1)]
)
def test_empty_text_raises_or_is_skipped(tmp_path, text, row):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(InputError, match=f"^{row} cannot be encoded"):
        embed(tmp_path / "t.csv", LetterCounts(), tmp_path / "a", **QUIET)
    assert list(embed(tmp_path / "t.csv", LetterCounts(), tmp_path / "b", on_error="skip", **QUIET).skipped) == [
        str(row)
    ]


def test_csv_of_images(tmp_path):
    photos(tmp_path / "p", 3, ("x",))
    (tmp_path / "t.csv").write_text("image,label,split\np/x/000.png,b,train\np/x/001.png,a,test\np/x/002.png,,\n")
    s = open_input_source(tmp_path / "t.csv")
    assert (
        s.modality == "image"
        and s.y.tolist() == [1, 0, -1]
        and s.ids[0] == "p/x/000.png"
        and s.read(1) == (tmp_path / "p/x/001.png").read_bytes()
    )
    assert read_pack(embed(s, BlockEncoder(), tmp_path, **QUIET).path).split.tolist() == ["train", "test", ""]
    (tmp_path / "p/x/001.png").unlink()
    with pytest.raises(InputError, match="1 of 3 files are missing, first p/x/001.png"):
        open_input_source(tmp_path / "t.csv")


def test_fingerprint_depends_on_content_labels_and_splits(tmp_path):
    def of(text):
        (tmp_path / "t.csv").write_text(text)
        return read_csv_source(tmp_path / "t.csv").fingerprint

    base = of("text,label,split\na,x,train\nb,y,train\n")
    assert base == of("text,label,split\na,x,train\nb,y,train\n")
    assert (
        len(
            {
                base,
                of("text,label,split\na,x,train\nc,y,train\n"),
                of("text,label,split\na,x,train\nb,x,train\n"),
                of("text,label,split\na,x,train\nb,y,test\n"),
                of("text,label,split\na,x,train\nb,z,train\n"),
            }
        )
        == 5
    )


# -- public sets in miniature ------------------------------------------------------------------------------


def needs(*packages):
    absent = [p for p in packages if importlib.util.find_spec(p) is None]
    if absent:
        warnings.warn(f"NOT CHECKED: {', '.join(absent)} not here", stacklevel=2)
        pytest.skip(f"needs {', '.join(absent)}")
    patch_torchvision()


def write_files(root, files):
    "Write files: texts, bytes, or for a number the random image of that seed."
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            picture(content, kind="JPEG")
            if isinstance(content, int)
            else content
            if isinstance(content, bytes)
            else content.encode()
        )


def open_miniature(name, root, **options):
    "Open a set without a download and without checking its number of rows."
    return open_dataset(name, root, download=False, check_rows=False, **options)


def images(s):
    return [np.asarray(Image.open(io.BytesIO(s.read(i)))) for i in range(len(s))]


@pytest.mark.parametrize("name,key,labels", [("cifar10", "CIFAR10", "labels"), ("cifar100", "CIFAR100", "fine_labels")])
def test_cifar(name, key, labels, tmp_path, monkeypatch):
    needs("torchvision")
    import torchvision

    make = getattr(torchvision.datasets, key)
    data = np.random.default_rng(0).integers(0, 256, (4, 3072), np.uint8)

    def file(content):
        return pickle.dumps(content)

    test, meta = file({"data": data, labels: [3, 0, 3, 1]}), file({make.meta["key"]: ["a", "b", "c", "d"]})
    write_files(
        tmp_path / make.base_folder,
        {make.test_list[0][0]: test, make.meta["filename"]: meta, **{f: test for f, _ in make.train_list}},
    )
    md5 = lambda b: hashlib.md5(b).hexdigest()
    monkeypatch.setattr(make, "test_list", [[make.test_list[0][0], md5(test)]])
    monkeypatch.setattr(make, "train_list", [[f, md5(test)] for f, _ in make.train_list])
    monkeypatch.setattr(make, "meta", make.meta | {"md5": md5(meta)})
    s = open_miniature(name, tmp_path)
    assert (
        s.classes == ("a", "b", "c", "d")
        and s.y.tolist() == [3, 0, 3, 1]
        and s.ids == [f"test_{i:05d}" for i in range(4)]
        and s.name == name
    )
    assert np.array_equal(s.read(2), data[2].reshape(3, 32, 32).transpose(1, 2, 0))
    es = read_pack(embed(s, BlockEncoder(), tmp_path, **QUIET).path)
    assert es.n == 4 and es.meta["licence"] and es.split.tolist() == ["test"] * 4
    both = open_miniature(name, tmp_path, splits=["train", "test"])
    assert (
        both.name == f"{name}_train_test"
        and both.split.count("train") == 4 * len(make.train_list)
        and both.fingerprint != s.fingerprint
    )
    (tmp_path / make.base_folder / make.test_list[0][0]).write_bytes(test[:-9])
    with pytest.raises(InputError, match=f"{name}: expected its files in .*corrupted"):
        open_miniature(name, tmp_path)


def test_aircraft_keeps_the_order_of_its_classes(tmp_path):
    needs("torchvision")
    d = "fgvc-aircraft-2013b/data"
    write_files(
        tmp_path,
        {
            f"{d}/variants.txt": "747-100\n707-320\n",
            f"{d}/images_variant_test.txt": "0001 707-320\n0002 747-100\n",
            f"{d}/images_variant_train.txt": "0003 747-100\n",
            **{f"{d}/images/000{i}.jpg": i for i in (1, 2, 3)},
        },
    )
    s = open_miniature("FGVC_aircraft".replace("FGVC_", ""), tmp_path)
    assert (
        s.classes == ("747-100", "707-320")
        and s.y.tolist() == [1, 0]
        and s.ids == [f"{d}/images/0001.jpg", f"{d}/images/0002.jpg"]
    )  # file order, not alphabetical
    assert np.abs(images(s)[0].astype(int) - np.asarray(Image.open(io.BytesIO(picture(1, kind="JPEG"))))).max() == 0
    assert open_miniature("aircraft", tmp_path, splits=["train", "test"]).y.tolist() == [0, 1, 0]
    (tmp_path / d / "images/0002.jpg").unlink()
    with pytest.raises(
        InputError, match="aircraft: 1 of 2 files are missing, first fgvc-aircraft-2013b/data/images/0002.jpg"
    ):
        open_miniature("aircraft", tmp_path)


def test_food_pet_and_cars(tmp_path):
    needs("torchvision", "scipy")
    from scipy.io import savemat

    write_files(
        tmp_path,
        {
            "food-101/meta/test.json": json.dumps({"waffles": ["waffles/1"], "pho": ["pho/2", "pho/3"]}),
            "food-101/images/waffles/1.jpg": 1,
            "food-101/images/pho/2.jpg": 2,
            "food-101/images/pho/3.jpg": 3,
        },
    )
    s = open_miniature("food-101", tmp_path)
    assert s.classes == ("pho", "waffles") and sorted(zip(s.ids, s.y.tolist())) == [
        ("food-101/images/pho/2.jpg", 0),
        ("food-101/images/pho/3.jpg", 0),
        ("food-101/images/waffles/1.jpg", 1),
    ]
    p = "oxford-iiit-pet"
    write_files(
        tmp_path,
        {
            f"{p}/annotations/trainval.txt": "Abyssinian_1 1 1 1\nbeagle_7 2 2 1\n",
            f"{p}/annotations/test.txt": "beagle_9 2 2 1\nAbyssinian_4 1 1 1\n",
            **{
                f"{p}/images/{f}.jpg": i for i, f in enumerate(("Abyssinian_1", "beagle_7", "beagle_9", "Abyssinian_4"))
            },
        },
    )
    s = open_miniature("pet", tmp_path)
    assert (
        s.classes == ("Abyssinian", "Beagle")
        and s.y.tolist() == [0, 1, 1, 0]
        and s.split == ["trainval"] * 2 + ["test"] * 2
    )
    c = tmp_path / "stanford_cars"
    write_files(c, {"cars_train/00001.jpg": 1, "cars_test/00001.jpg": 2, "devkit/x": ""})
    note = lambda f, k: np.array([(f, k)], dtype=[("fname", object), ("class", object)])
    savemat(
        c / "devkit/cars_train_annos.mat",
        {"annotations": np.concatenate([note("00001.jpg", 2), note("00001.jpg", 1)])[:2]},
    )
    savemat(c / "cars_test_annos_withlabels.mat", {"annotations": np.concatenate([note("00001.jpg", 1)] * 2)})
    savemat(c / "devkit/cars_meta.mat", {"class_names": np.array(["Acura", "BMW"], dtype=object)})
    s = open_miniature("cars", tmp_path)
    assert (
        s.classes == ("Acura", "BMW")
        and s.y.tolist() == [1, 0, 0, 0]
        and s.ids[2] == "stanford_cars/cars_test/00001.jpg"
    )


def test_flowers(tmp_path, monkeypatch):
    needs("torchvision", "scipy")
    import torchvision
    from scipy.io import savemat

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
    assert (
        s.y.tolist() == [1, 0]
        and s.classes[0] == "pink primrose"
        and len(s.classes) == 102
        and s.ids[0] == "flowers-102/jpg/image_00001.jpg"
    )


def test_grocery(tmp_path):
    key = DATASETS["grocery"].key
    d = f"GroceryStoreDataset-{key}/dataset"
    write_files(
        tmp_path,
        {
            f"{d}/classes.csv": "Class Name (str),Class ID (int),Coarse Class Name (str),Coarse Class ID (int)\n"
            "Pink-Lady,1,Apple,0\nGolden-Delicious,0,Apple,0\n",
            f"{d}/train.txt": "train/Fruit/Apple/g.jpg, 0, 0\n",
            f"{d}/val.txt": "val/p.jpg, 1, 0\n",
            f"{d}/test.txt": "test/p.jpg, 1, 0\n",
            f"{d}/train/Fruit/Apple/g.jpg": 1,
            f"{d}/val/p.jpg": 2,
            f"{d}/test/p.jpg": 3,
        },
    )
    s = open_miniature("grocery", tmp_path)
    assert (
        s.classes == ("Golden-Delicious", "Pink-Lady")
        and s.y.tolist() == [0, 1, 1]
        and s.split == ["train", "val", "test"]
    )


def test_cub(tmp_path):
    d = "CUB_200_2011"
    write_files(
        tmp_path,
        {
            f"{d}/images.txt": "1 002.B/x.jpg\n2 001.A/y.jpg\n3 001.A/z.jpg\n",
            f"{d}/image_class_labels.txt": "1 2\n2 1\n3 1\n",
            f"{d}/train_test_split.txt": "1 0\n2 1\n3 0\n",
            f"{d}/classes.txt": "1 001.A\n2 002.B\n",
            f"{d}/images/002.B/x.jpg": 1,
            f"{d}/images/001.A/y.jpg": 2,
            f"{d}/images/001.A/z.jpg": 3,
        },
    )
    s = open_miniature("cub-200", tmp_path)
    assert s.classes == ("A", "B") and s.y.tolist() == [1, 0, 0] and s.split == ["test", "train", "test"]
    with pytest.raises(InputError, match="expected 11788 rows in train, test, found 3"):
        open_dataset("cub200", tmp_path, download=False)


def test_tiny_imagenet(tmp_path):
    d = "tiny-imagenet-200"
    write_files(
        tmp_path,
        {
            f"{d}/wnids.txt": "n02\nn01\n",
            f"{d}/words.txt": "n01\tgoldfish, Carassius auratus\nn02\ttailed frog, bell toad\nn03\tother\n",
            f"{d}/val/val_annotations.txt": "val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\n",
            f"{d}/val/images/val_0.JPEG": 1,
            f"{d}/val/images/val_1.JPEG": 2,
            f"{d}/train/n01/images/n01_0.JPEG": 3,
            f"{d}/train/n02/images/n02_0.JPEG": 4,
        },
    )
    s = open_miniature("tiny-imagenet", tmp_path)
    assert (
        s.classes == ("n01 goldfish", "n02 tailed frog")
        and s.y.tolist() == [1, 0]
        and s.ids[0] == f"{d}/val/images/val_0.JPEG"
    )
    assert open_miniature("tiny-imagenet", tmp_path, splits=["train"]).y.tolist() == [0, 1]


def test_imagenet_samples_35_rows_per_class(tmp_path):
    write_files(tmp_path, {f"train/n0{c}/n0{c}_{i}.JPEG": b"x" for c in (1, 2) for i in range(40)})
    s, again, other = (open_dataset("imagenet", tmp_path, seed=seed) for seed in (42, 42, 7))
    assert (
        len(s) == 70
        and np.bincount(s.y).tolist() == [35, 35]
        and s.ids == again.ids != other.ids
        and s.classes == ("n01", "n02")
    )
    assert "35 rows per class by seed 42" in s.meta["notes"] and sorted(s.ids) == s.ids
    assert (
        open_dataset("imagenet", tmp_path / "train", per_class=3).y.tolist() == [0] * 3 + [1] * 3
    )  # the class folders themselves
    with pytest.raises(InputError, match="imagenet: expected its files in .*image-net.org"):
        open_dataset("imagenet", tmp_path / "none")


def test_clinc150_and_banking77(tmp_path):
    write_files(
        tmp_path,
        {
            "data_full.json": json.dumps(
                {"train": [["t", "b"]], "val": [["v", "a"]], "test": [["e", "a"]], "oos_test": [["u", "oos"]]}
            ),
            "banking77/train.csv": 'text,category\n"one, two",lost\nthree,card\n',
            "banking77/test.csv": "text,category\nfour,card\n",
        },
    )
    s = open_miniature("clinc150", tmp_path)
    assert (
        s.modality == "text" and s.classes == ("a", "b") and s.y.tolist() == [1, 0, 0, -1] and s.split[-1] == "oos_test"
    )
    assert open_miniature("clinc150", tmp_path, splits=["test"]).y.tolist() == [0]
    s = open_miniature("banking77", tmp_path)
    assert (
        s.classes == ("card", "lost")
        and s.y.tolist() == [1, 0, 0]
        and s.read(0) == "one, two"
        and s.split == ["train", "train", "test"]
    )
    assert read_pack(embed(s, LetterCounts(), tmp_path, **QUIET).path).n == 3


@pytest.mark.parametrize("name", DATASETS)
def test_unreachable_dataset_raises_input_error(name, tmp_path, monkeypatch):
    "Without files and network, the message says in one line where the files belong and what to do."
    if DATASETS[name].read.__name__ not in ("_read_clinc150", "_read_banking77", "_read_imagenet"):
        needs("torchvision", "scipy")
    import socket

    def no_network(*a, **k):
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    with pytest.raises(
        InputError,
        match=rf"{name}: expected its files in .*got .*; (run this where|download ILSVRC|its original download)",
    ) as error:
        open_dataset(name, tmp_path)
    assert "\n" not in str(error.value) and "download=True" not in str(error.value)
    assert not any(p.is_file() for p in tmp_path.rglob("*"))  # an incomplete file could be taken for a complete one


@pytest.fixture
def server(tmp_path):
    "A local web server; gives its folder, its address and the list of requested paths."

    class RecordingHandler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            requests.append(self.path)

    requests, folder = [], tmp_path / "served"
    folder.mkdir()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *a: RecordingHandler(*a, directory=str(folder))) as s:
        threading.Thread(target=s.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{s.server_port}", requests
        s.shutdown()


def test_archive_is_downloaded_once_and_checked(server, tmp_path):
    "With and without a checksum; a wrong checksum or an incomplete archive leaves no folder behind."
    needs("torchvision")
    folder, address, requests = server
    with zipfile.ZipFile(folder / "a.zip", "w") as z:
        z.writestr("top/x.txt", "hello")
    whole = (folder / "a.zip").read_bytes()
    for sum_ in (hashlib.md5(whole).hexdigest(), None):
        root = tmp_path / f"root{sum_}"
        assert (_unpack(f"{address}/a.zip", root, "top", True, sum_) / "x.txt").read_text() == "hello" and [
            p.name for p in root.iterdir()
        ] == ["top"]
        before = len(requests)
        assert (_unpack(f"{address}/a.zip", root, "top", True, sum_) / "x.txt").exists() and len(requests) == before
    with pytest.raises(RuntimeError):
        _unpack(f"{address}/a.zip", tmp_path / "bad", "top", True, "0" * 32)
    (folder / "a.zip").write_bytes(whole[:30])
    with pytest.raises(zipfile.BadZipFile):
        _unpack(f"{address}/a.zip", tmp_path / "half", "top", True)
    assert not (tmp_path / "bad" / "top").exists() and not (tmp_path / "half" / "top").exists()


def test_file_is_downloaded_once_and_checked(server, tmp_path):
    folder, address, requests = server
    (folder / "f.csv").write_text("text\nhello\n")
    good = hashlib.sha256((folder / "f.csv").read_bytes()).hexdigest()
    path = _fetch(f"{address}/f.csv", tmp_path / "r", "deep/f.csv", True, good)
    assert (
        path.read_text() == "text\nhello\n"
        and _fetch("http://nowhere", tmp_path / "r", "deep/f.csv", True, "0") == path
        and len(requests) == 1
    )
    with pytest.raises(RuntimeError, match="invalid hash"):
        _fetch(f"{address}/f.csv", tmp_path / "q", "f.csv", True, "0" * 64)
    assert not list((tmp_path / "q").iterdir())
    with pytest.raises(FileNotFoundError, match="f.csv is not in it"):
        _fetch(f"{address}/f.csv", tmp_path / "q", "f.csv", False)
    with pytest.raises(InputError, match="clinc150: expected its files in .*data_full.json is not in it"):
        open_miniature("clinc150", tmp_path)


def test_dataset_specs():
    assert len(DATASETS) == 13 and all(
        set(c.default) <= set(c.splits) and c.source and c.licence for c in DATASETS.values()
    )
    published = {
        "cifar100": 10_000,
        "cifar10": 10_000,
        "aircraft": 3_333,
        "food101": 25_250,
        "pet": 7_349,
    }  # what the released code embeds
    assert {k: DATASETS[k].rows for k in published} == published and DATASETS["imagenet"].per_class == 35
    with pytest.raises(InputError, match="cifar100, cifar10, aircraft.*got 'mnist'"):
        open_dataset("mnist")
    with pytest.raises(InputError, match="food101 has the splits train, test, got val"):
        open_dataset("food101", splits=["val"])


def test_sample_per_class_equals_a_loop():
    y = np.array([0, 1, 1, -1, 0, 1, 2, 0, 0])
    rng = np.random.default_rng(5)
    expected = sorted(
        i for c in range(3) for i in rng.permutation([j for j in range(len(y)) if y[j] == c])[:2].tolist()
    )
    assert sample_per_class(y, 2, 5).tolist() == expected and len(expected) == 5


def test_released_class_split_gives_published_classes():
    "The class numbers that the released runs print; Aircraft and CIFAR-100 have the same."
    first = {1, 2, 14, 20, 21, 23, 29, 37, 51, 52, 60, 63, 71, 74, 82}
    assert set(released_class_split(np.arange(100)).unseen) == first | {84, 86, 87, 91, 92}
    assert set(released_class_split(np.arange(101)).unseen) == first | {59, 85, 86, 87, 92, 99}
    s = released_class_split(np.repeat(np.arange(37), 3))
    assert set(s.unseen) == {7, 10, 14, 18, 20, 22, 28, 30} and len(s.seen) == 29 and not set(s.seen) & set(s.unseen)


def test_patch_torchvision_does_nothing_when_not_needed(monkeypatch):
    if importlib.util.find_spec("torchvision") is None:
        assert patch_torchvision() is None
        return
    healthy = types.ModuleType("torchvision")
    healthy.__spec__ = importlib.util.find_spec("torchvision")
    monkeypatch.setitem(sys.modules, "torchvision", healthy)
    assert patch_torchvision() is None


def test_missing_torchvision_names_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    monkeypatch.setattr("ega.data.datasets.patch_torchvision", lambda: None)
    with pytest.raises(ImportError, match=r"torchvision.*ega\[encoders\]"):
        open_dataset("cifar10", tmp_path)


def test_a_table_of_integers_with_blanks_has_the_classes_of_one_without(tmp_path):
    (tmp_path / "t.csv").write_text("text;label\na;3.0\nb;\nc;10.0\nd;NA\ne;3.0\n")
    source = read_csv_source(tmp_path / "t.csv")
    assert source.classes == ("10", "3") and list(source.y) == [1, -1, 0, -1, 1]
    (tmp_path / "t.csv").write_text("text,label\na,none\nb,\nc,owl\n")  # `ega fit` asks about the class "none"
    assert read_csv_source(tmp_path / "t.csv").classes == ("none", "owl")
