from bench.engine import merged


def row(shape, num_tokens, mode, run=1):
    return {"shape": shape, "num_tokens": num_tokens, "mode": mode, "run": run}


def test_a_row_takes_the_place_of_the_one_that_it_repeats():
    rows = []
    for new in (
        row("8b", 131072, "mlx_lm_kv4"),
        row("8b", 8192, "ours"),
        row("70b", 8192, "ours"),
        row("8b", 131072, "ours"),
        row("8b", 131072, "mlx_lm_kv4", run=2),
    ):
        rows = merged(rows, new)
    assert rows == [
        row("70b", 8192, "ours"),
        row("8b", 8192, "ours"),
        row("8b", 131072, "ours"),
        row("8b", 131072, "mlx_lm_kv4", run=2),
    ]
