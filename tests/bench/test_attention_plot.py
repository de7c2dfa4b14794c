"""The plot of bench.decode_attention shows each way where it was measured."""

from xml.etree import ElementTree

from bench import attention_plot


def row(num_tokens, ours, theirs):
    return {"num_tokens": num_tokens, "ours_ms": ours, "mlx_sdpa_fp16_ms": theirs, "floor_ms": ours / 2}


def test_every_measured_way_is_a_line_through_its_points(tmp_path):
    path = tmp_path / "plot.svg"
    attention_plot.write(
        path, "a < b", [row(131072, 0.04, 0.13), row(1024, 0.009, None), row(16384, 0.01, 0.03)]
    )
    root = ElementTree.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    lines = {p.get("stroke"): p.get("d") for p in root.iter(f"{space}path") if p.get("fill") == "none"}
    assert lines["#1f6f4a"].count("L") == 2
    assert lines["#555555"].count("L") == 1
    assert "#b3541e" not in lines
    words = [t.text for t in root.iter(f"{space}text")]
    assert "a < b" in words
    assert {"1K", "16K", "128K", "int4c"} <= set(words)
    # Less time is further down, longer caches are further right.
    ours = [tuple(map(float, p.split())) for p in lines["#1f6f4a"][1:].split("L")]
    assert ours == sorted(ours)
    assert ours[0][1] > ours[-1][1]
