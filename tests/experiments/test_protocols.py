"Protocols and published numbers: counts of the published runs, every experiment on random rows, and the command."

import concurrent.futures
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from ega import cli
from ega.data.arrays import InputError, normalize
from ega.data.datasets import DATASETS
from ega.data.encoders import encoder_spec
from ega.data.packs import EmbeddingSet, path_of_pack, write_pack
from ega.experiments import cli as paper_cli
from ega.experiments import grids
from ega.experiments.grids import ResultStore
from ega.experiments.protocols import (
    PAPER_PACKS,
    Protocol,
    Split,
    build_split,
    evaluate_neighbours,
    get_benchmark,
    get_protocol,
    load_embedding_sets,
    published_experiments,
    published_split_counts,
    released_class_split,
    split_counts,
)
from ega.experiments.published import (
    build_cells,
    configs_for,
    deviation_notes,
    embed_command,
    format_cells,
    list_tables_and_figures,
    read_published,
    reproduced_value,
    required_packs,
    run_cells,
)
from ega.experiments.runs import evaluate_settings, run_experiment
from ega.measure.search import Neighbours, SearchConfig

root = Path(__file__).resolve().parents[2]
printed = read_published(root / "data/published.csv")
PROTOCOL_NAMES = ("paper", "released", "strict")
UNSEEN = {
    "aircraft": [1, 2, 14, 20, 21, 23, 29, 37, 51, 52, 60, 63, 71, 74, 82, 84, 86, 87, 91, 92],
    "food101": [1, 2, 14, 20, 21, 23, 29, 37, 51, 52, 59, 60, 63, 71, 74, 82, 85, 86, 87, 92, 99],
    "pet": [7, 10, 14, 18, 20, 22, 28, 30],
}
UNSEEN["cifar100"] = UNSEEN["aircraft_train_test"] = UNSEEN["aircraft"]


ROWS = {  # pack -> numbers of classes, of rows of the seen and of the unseen classes
    "cifar100": (100, 8_000, 2_000),
    "cifar10": (10, 8_000, 2_000),
    "aircraft": (100, 2_664, 669),
    "aircraft_train_test": (100, 5_332, 1_335),
    "food101": (101, 20_000, 5_250),
    "pet": (37, 5_771, 1_578),
}


def rows_of_classes(pack):
    "Rows of each class: as even as the totals of seen and unseen classes allow."
    n_classes, *totals = ROWS[pack]
    unseen = np.array(UNSEEN.get(pack, range(n_classes // 5)))
    n = np.empty(n_classes, int)
    for members, total in zip((np.setdiff1d(np.arange(n_classes), unseen), unseen), totals):
        n[members] = total // len(members)
        n[members[: total % len(members)]] += 1
    return n


def imagenet_rows_of_classes():
    "34,745 rows of 1,000 classes; 6,914, 6,988 and 7,030 of them are in the unseen classes of seeds 42, 123 and 456."
    unseen = [set(released_class_split(np.arange(1000), seed=s).unseen.tolist()) for s in (42, 123, 456)]
    alone = [sorted(unseen[i] - unseen[(i + 1) % 3] - unseen[(i + 2) % 3]) for i in range(3)]
    alone.append(sorted(set(range(1000)) - set.union(*unseen)))
    n = np.full(1000, 35)
    for members, change in zip(alone, (-86, -12, 30, 34_745 - 35_000 + 86 + 12 - 30)):
        np.add.at(n, [members[i % len(members)] for i in range(abs(change))], np.sign(change))
    return n


def labels(pack):
    "Labels of a pack of the paper's size, in mixed order as in a file."
    n = imagenet_rows_of_classes() if pack == "imagenet" else rows_of_classes(pack)
    return np.random.default_rng(7).permutation(np.repeat(np.arange(len(n)), n))


def write_random_pack(pack, encoder, y, folder):
    "Random unit rows in four dimensions."
    x = normalize(np.random.default_rng(0).normal(size=(len(y), 4)))
    es = EmbeddingSet(x, y, meta={"set": pack, "encoder": encoder})
    write_pack(es, path_of_pack(pack, encoder, folder), dtype="float32")


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    "Packs of the sizes of the released runs."
    folder = tmp_path_factory.mktemp("packs")
    benchmarks = {get_benchmark(key) for e in published_experiments().values() for key, *_ in e.sets}
    for pack, encoder in {(pack, b.encoder) for b in benchmarks for pack in (b.train, b.unseen)}:
        y = labels(pack)
        assert len(y) == PAPER_PACKS[pack].rows
        write_random_pack(pack, encoder, y, folder)
    return folder


SETS = [
    (name, b, s)
    for name, e in published_experiments().items()
    for b, *_ in e.sets
    for s in (e.seeds if e.seed_splits else (42,))
]


def test_table_has_every_experiment():
    assert {k.rstrip("b") for k in published_experiments()} == {f"E{i}" for i in range(1, 24)}
    assert all((e.task is None) == bool(e.not_run_reason) == (not e.sets) for e in published_experiments().values())


@pytest.mark.parametrize("name,benchmark,seed", SETS)
def test_released_splits_have_the_published_counts_and_classes(packs, name, benchmark, seed):
    experiment, b = published_experiments()[name], get_benchmark(benchmark)
    config = SimpleNamespace(task=experiment.task, benchmark=benchmark, protocol=f"released/{name}", split_seed=seed)
    es, other = load_embedding_sets(config, packs)
    split = build_split(config, es, other)
    assert split_counts(split) == published_split_counts(name, benchmark, seed)
    if experiment.protocol.leak:
        assert set(split.seen_queries) <= set(split.fit) and len(split.fit) == es.n
    elif experiment.task == "in_distribution":
        assert not set(split.fit) & set(split.seen_queries)
    elif b.train == b.unseen:
        unseen = set(other.y[np.r_[split.unseen_gallery, split.unseen_queries]].tolist())
        assert not unseen & set(es.y[split.fit].tolist())
        assert b.train not in UNSEEN or sorted(unseen) == UNSEEN[b.train]
    if experiment.protocol.row_rule == "file":
        assert split.seen_queries.tolist() == list(range(8_000, 10_000)) and split.fit.tolist() == list(range(8_000))


LEAKS = {  # name -> field, field that one of its rows comes from
    "seen query fitted on": ("fit", "seen_queries"),
    "seen query searched": ("seen_gallery", "seen_queries"),
    "unseen row fitted on": ("fit", "unseen_gallery"),
    "unseen class fitted on": None,
    "unlabelled row fitted on": None,
    "some gallery rows as queries": None,
}


@pytest.mark.parametrize("leak", LEAKS)
def test_split_check_finds_every_leak(leak):
    y, number = np.repeat(np.arange(10), 12), np.arange(120)
    fit, held_out, unseen = (
        np.flatnonzero(m) for m in ((y < 8) & (number % 4 > 0), (y < 8) & (number % 4 == 0), y > 7)
    )
    rows = dict(fit=fit, seen_gallery=fit, seen_queries=held_out, unseen_gallery=unseen, unseen_queries=unseen)
    Split(**rows).check(y)
    Split(**rows | dict(unseen_gallery=fit, unseen_queries=fit)).check(y, y)  # the same numbers of another set
    if LEAKS[leak]:
        field, source = LEAKS[leak]
        rows[field] = np.r_[rows[field], rows[source][5]]
    elif leak == "unseen class fitted on":
        y[unseen[5]] = y[fit[0]]
    elif leak == "unlabelled row fitted on":
        y[fit[5]] = -1
    else:
        rows["unseen_queries"] = unseen[:3]
    with pytest.raises(InputError):
        Split(**rows).check(y)


def trial(config):
    "The same run at one epoch and sixteen hidden units."
    adapter = replace(config.adapter, hidden=16) if config.adapter.hidden else config.adapter
    return replace(config, adapter=adapter, train=replace(config.train, epochs=1) if config.train else None)


def config_of(protocol, artefact, dataset, method, backbone=""):
    "The first configuration behind a printed number."
    wanted = (artefact, dataset, method)
    lines = (r for r in printed.itertuples() if (r.artefact, r.dataset, r.method) == wanted)
    return configs_for(next(r for r in lines if r.backbone.startswith(backbone)), protocol)[0]


def test_deviations_change_the_configurations():
    "A few deviations, read from the configurations of published numbers."
    code, text = (config_of(p, "tab:indist_summary", "CIFAR-100", "LoRA+Triplet") for p in ("released", "paper"))
    assert (code.adapter.rank, text.adapter.rank, code.adapter.scale, text.adapter.scale) == (8, 128, 2, 0.125)  # D2
    assert get_protocol(code.protocol).leak and not get_protocol(text.protocol).leak  # D3
    assert code.loss.self_positive and code.loss.sampler == "dataset" and text.loss.sampler == "batch"  # D25
    code, text = (config_of(p, "tab:indist_summary", "CIFAR-100", "EGA") for p in ("released", "paper"))
    assert (code.adapter.kind, text.adapter.kind) == ("ega_released", "ega_paper")  # D1
    train = code.train
    assert (train.lr, train.batch_size, train.epochs, train.schedule) == (1e-5, 1024, 120, "constant")  # D22
    assert not code.loss.self_positive
    schedules = [config_of("released", "fig:mechanism", "Aircraft", m).train.schedule for m in ("EGA", "ICon")]
    assert schedules == ["constant", "cosine"]  # D18
    rank = config_of("released", "tab:lora_rank", "Aircraft", "LoRA+Triplet r=512").adapter
    assert (rank.rank, rank.scale) == (512, 16 / 512)
    assert config_of("released", "tab:sensitivity", "CIFAR-100", "EGA m=0.1").loss.margin == 0.1
    kinds = [config_of(p, "tab:ood_summary", "Aircraft", "ICon").loss.kind for p in ("paper", "released")]
    assert kinds == ["icon", "icon_self_included"]  # D29
    text, code = (config_of(p, "tab:ood_summary", "ImageNet-1K", "EGA").train for p in ("paper", "released"))
    assert text.batch_size == 512 and code.epochs == 100
    siglip = [config_of(p, "tab:ega_backbones", "Aircraft", "EGA", "SigLIP") for p in ("released", "paper")]
    encoders = [c.benchmark.split("@")[1] for c in siglip]
    assert encoders == ["siglip_large_patch16_384", "siglip_so400m"]  # D20


def test_evaluate_neighbours_equals_a_loop():
    rng = np.random.default_rng(0)
    yb, yq = rng.integers(5, size=40), rng.integers(5, size=30)
    I, exact_I = (np.stack([rng.permutation(40)[:6] for _ in range(30)]) for _ in "ab")
    I[::3, 4:] = -1
    D = np.where(I < 0, np.inf, np.sort(rng.random((30, 6)), 1))
    found, exact = Neighbours(D, I), Neighbours(np.sort(rng.random((30, 6)), 1), exact_I)
    for k in (1, 3, 6):
        lp, ar = evaluate_neighbours(found, exact, yb, yq, k, "as_returned")
        # where nothing was found, the label is yb[-1]
        assert np.allclose(lp, [np.mean([yb[i] == q for i in row[:k]]) for row, q in zip(I, yq)])
        assert np.allclose(ar, [len(set(row[:k]) & set(e[:k])) / k for row, e in zip(I, exact_I)])
    last = yb[-1] == yq[::3]
    returned, averaged = (evaluate_neighbours(found, exact, yb, yq, 6, r)[0] for r in ("as_returned", "ties_averaged"))
    assert last.any() and np.allclose(returned[::3] - averaged[::3], last * 2 / 6)


def test_settings_evaluated_together_equal_single_ones():
    rng = np.random.default_rng(1)
    zb, zq = normalize(rng.normal(size=(300, 6))), normalize(rng.normal(size=(80, 6)))
    yb, yq = rng.integers(6, size=300), rng.integers(6, size=80)
    protocol = Protocol(index=SearchConfig("ivf", 1, 10, 1), nprobes=(1, 5, 10), ks=(1, 3))
    many = evaluate_settings(zq, zb, yq, yb, protocol)
    assert len(many) == 6 and next(iter(many)) == protocol.index
    for setting, outcomes in many.items():
        alone = evaluate_settings(zq, zb, yq, yb, Protocol(index=setting))[setting]
        assert all(np.allclose(a, b) for a, b in zip(outcomes, alone))
    exact = evaluate_settings(zq, zb, yq, yb, Protocol(index=SearchConfig("exact"), ks=(1, 5)))
    assert all((v.ivf_ar == 1).all() and np.array_equal(v.hit, v.ivf_hit) for v in exact.values())


def test_embed_commands_parse_and_name_their_pack():
    tables = [build_cells(printed, a, p) for p in PROTOCOL_NAMES for a in list_tables_and_figures(printed)]
    needed = {pair for cells in tables for cell in cells for pair in required_packs(cell.configs)}
    assert len(needed) == 19
    for pack, encoder in needed:
        args = cli.parser().parse_args(shlex.split(embed_command(pack, encoder))[1:])
        spec = DATASETS[args.dataset]
        splits = tuple(args.splits or spec.default)
        assert set(splits) <= set(spec.splits) and encoder_spec(args.encoder)[0] == encoder
        assert pack == (args.dataset if splits == spec.default else f"{args.dataset}_{'_'.join(splits)}")
        assert not (splits == spec.default and spec.rows) or PAPER_PACKS[pack].rows == spec.rows


@pytest.mark.parametrize("protocol", PROTOCOL_NAMES)
def test_every_artefact_prints_its_cells_and_commands(protocol):
    for artefact in list_tables_and_figures(printed):
        cells = build_cells(printed, artefact, protocol)
        text = format_cells(cells, None, "nowhere")
        n_run = sum(bool(cell.configs) for cell in cells)
        assert text.count("needs pack") == n_run and text.count("not run (") == len(cells) - n_run
        for pair in required_packs([config for cell in cells for config in cell.configs]):
            assert embed_command(*pair) in text


@pytest.fixture
def one_process(monkeypatch):
    "Runs are made in this process: a worker would need longer to import torch than to make them."
    monkeypatch.setattr(grids, "ProcessPoolExecutor", lambda *args: concurrent.futures.ThreadPoolExecutor(1))


@pytest.fixture
def clone(tmp_path, monkeypatch):
    "The current folder, which `find_repository` accepts, with the published numbers."
    for folder in ("nbs", "data/packs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "data/published.csv").write_bytes((root / "data/published.csv").read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_reproduce_runs_resumes_and_prints_published_beside_ours(clone, packs, one_process, capsys):
    def reproduce():
        options = ["--experiments", "tab:pet_ood", "--epochs", "1", "--packs", str(packs), "--workers", "1"]
        assert paper_cli.main(["reproduce", "--protocol", "released", *options]) == 0
        return capsys.readouterr().out

    first, again = reproduce(), reproduce()
    assert "3 runs made now" in first and first.replace("3 runs", "0 runs") == again
    assert "warning" not in first and first.count(" 395\n") == first.count("[0.") == 6
    folder = clone / "build/paper"
    rows = ResultStore(folder, "released").read()
    run_id = rows.run_id[rows.method == "frozen"].iloc[0]
    assert paper_cli.main(["rerun", run_id, "--results", str(folder), "--packs", str(packs)]) == 0
    assert "first neighbours changed 0" in capsys.readouterr().out


def test_missing_packs_are_listed_and_nothing_is_run(clone, capsys):
    assert paper_cli.main(["reproduce", "--protocol", "paper", "--experiments", "tab:ood_summary"]) == 0
    out = capsys.readouterr().out
    assert out.count("needs pack") == 54 and "0 runs made now" in out
    assert "ega embed --encoder clip-vit-b32 --dataset cifar10 --splits train test" in out
    assert paper_cli.main(["reproduce", "--protocol", "released"]) == 0
    assert re.search(r"tab:ood_summary +54 +0 +66 +1, 2, 3, 4, 5\n", capsys.readouterr().out)
    assert paper_cli.main(["reproduce", "--protocol", "paper", "--experiments", "tab:nowhere"]) == 2


def test_pack_of_another_size_gives_a_warning(tmp_path, one_process):
    write_random_pack("pet", "clip_vit_b32", np.arange(7_200) % 37, tmp_path)
    cells = build_cells(printed, "tab:pet_ood", "released", epochs=1)
    cells = [replace(c, configs=tuple(map(trial, c.configs))) for c in cells]
    size, counts = deviation_notes(cells, tmp_path)
    assert "7,200 labelled rows, 7,349 were expected" in size and "in the published run (5771, 1183, 395)" in counts
    store = ResultStore(tmp_path, "r")
    assert run_cells(cells[:1], store, tmp_path, workers=1, progress=False) == 1
    assert "warning: pet by clip_vit_b32" in format_cells(cells, store.read(), tmp_path)


def test_compare_cell_gives_mean_population_sd_and_minimum_over_benchmarks():
    cells = build_cells(printed, "tab:ood_summary", "released")
    wanted = [c for c in cells if c.row.method == "EGA" and c.row.metric == "LP"]
    rng, rows = np.random.default_rng(0), []
    for c in dict.fromkeys(c for cell in wanted for c in cell.configs):
        n = 60 if "imagenet" not in c.benchmark else 60 + c.seed % 7
        hit = rng.integers(2, size=n).astype(np.float32) * (0.5 if "aircraft" in c.benchmark else 1)
        row = dict(run_id=c.run_id, benchmark=c.benchmark, split_seed=c.split_seed, seed=c.seed, query_set="unseen")
        rows.append(row | dict(k=1, nprobe=1, ivf_hit=hit, query_class=np.arange(n) % 6))
    results = pd.DataFrame(rows)
    *each, worst = [reproduced_value(cell, results, n_boot=200) for cell in wanted]
    for cell, ours in zip(wanted, each):
        of_cell = results[results.benchmark == cell.configs[0].benchmark]
        means = of_cell.ivf_hit.map(np.mean)
        assert len(means) == 3 and np.isclose(ours["value"], means.mean()) and np.isclose(ours["sd"], np.std(means))
        assert ours["low"] < ours["value"] < ours["high"]
        assert ours["n"] == of_cell.drop_duplicates("split_seed").ivf_hit.map(len).sum()
    assert wanted[-1].row.dataset == "worst of 4" and worst["runs"] == 12
    assert np.isclose(worst["value"], min(ours["value"] for ours in each))
    assert reproduced_value(wanted[0], results.iloc[1:]) is None


def test_active_ratio_is_in_the_unit_of_the_paper():
    cells = build_cells(printed, "tab:rho_datasets", "released") + build_cells(printed, "fig:mechanism", "released")
    cells = [c for c in cells if c.row.dataset == "Aircraft"]
    percent = next(c for c in cells if "rho (" in c.row.metric)
    zero = next(c for c in cells if "zero" in c.row.metric)
    epoch = next(c for c in cells if c.row.method == "EGA epoch 20")
    history = np.linspace(0.4, 0.03, 150)
    ids = {config.run_id for cell in (percent, epoch) for config in cell.configs}
    rows = [dict(run_id=i, active_ratio_history=history, active_ratio_final=history[-1]) for i in ids]
    results = pd.DataFrame(rows)
    values = [reproduced_value(cell, results)["value"] for cell in (percent, zero, epoch)]
    assert np.allclose(values, [3, 97, history[19]])
    short = results.assign(active_ratio_history=[history[:5]] * len(results))  # a trial that ended before epoch 20
    lines = format_cells([epoch], short, "nowhere").splitlines()
    assert any("EGA epoch 20" in line and " nan" in line for line in lines)


@pytest.mark.parametrize("protocol,queries,column", [("paper", 100, "lp_at_1_ivf"), ("strict", 400, "lp_at_1")])
def test_cells_run_under_paper_and_strict(tmp_path, protocol, queries, column):
    "2,000 rows of 100 classes: a quarter of the unseen rows are queries, or each is one against all others."
    write_random_pack("aircraft_train_val_test", "clip_vit_b32", np.arange(2_000) % 100, tmp_path)
    cells = build_cells(printed, "tab:ood_summary", protocol)
    cells = [c for c in cells if c.row.dataset == "Aircraft" and c.row.method in ("CLIP", "SRL")]
    cells = [replace(c, configs=tuple(map(trial, c.configs[:1]))) for c in cells]
    configs = dict.fromkeys(config for cell in cells for config in cell.configs)
    results = pd.concat([run_experiment(config, tmp_path, device="cpu") for config in configs])
    unseen = results[(results.query_set == "unseen") & (results.k == 1) & (results.nprobe == 1)].set_index("run_id")
    for cell in cells:
        ours, row = reproduced_value(cell, results), unseen.loc[cell.configs[0].run_id]
        assert ours["n"] == queries
        assert np.isclose(ours["value"], row["ar_at_1" if cell.row.metric == "AR" else column], atol=1e-6)
    kind = "ega_paper" if protocol == "paper" else "ega_released"
    assert {config.adapter.kind for config in configs} == {"identity", kind}
