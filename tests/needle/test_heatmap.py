from xml.etree import ElementTree

from bench.needle import heatmap

SVG = "{http://www.w3.org/2000/svg}"


def row(depth, recall, num_questions=2, restored=False, num_tokens=1024):
    return {
        "task": "multi_key",
        "num_tokens": num_tokens,
        "depth": depth,
        "format": "int4c",
        "restored": restored,
        "nonce": False,
        "num_questions": num_questions,
        "recall": recall,
    }


def written(tmp_path, rows):
    path = tmp_path / "needle.svg"
    heatmap.write(path, "Recall <of a model>", rows)
    root = ElementTree.parse(path).getroot()
    return [text.text for text in root.iter(f"{SVG}text")]


def test_each_case_has_a_panel_and_tasks_of_one_cell_are_one_number(tmp_path):
    rows = [row(0.25, 1.0), row(0.25, 0.0, num_questions=6), row(0.95, 0.5), row(0.25, 1.0, restored=True)]
    texts = written(tmp_path, rows)
    assert [t for t in texts if t.startswith("int4c")] == ["int4c cold", "int4c restored"]
    assert [t for t in texts if t.isdigit()] == ["25", "50", "100"]


def test_lengths_are_columns(tmp_path):
    texts = written(tmp_path, [row(0.05, 1.0), row(0.05, 0.0, num_tokens=131_072)])
    assert [t for t in texts if t.endswith("K")] == ["1K", "128K"]
