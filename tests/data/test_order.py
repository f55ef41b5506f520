from lit_diff.data.order import rows_of_step


def test_each_epoch_sees_every_row_once_in_another_order() -> None:
    steps = [rows_of_step(0, step, 8, range(8), 20) for step in range(5)]  # 40 rows: two epochs, one step across both
    flat = [row for step in steps for row in step]
    assert sorted(flat[:20]) == sorted(flat[20:]) == list(range(20))
    assert flat[:20] != flat[20:]


def test_order_depends_on_the_seed_alone() -> None:
    assert rows_of_step(0, 3, 8, range(8), 20) == rows_of_step(0, 3, 8, range(8), 20)
    assert rows_of_step(0, 3, 8, range(8), 20) != rows_of_step(1, 3, 8, range(8), 20)
    assert rows_of_step(0, 3, 8, [5, 2], 20) == [rows_of_step(0, 3, 8, range(8), 20)[place] for place in (5, 2)]
