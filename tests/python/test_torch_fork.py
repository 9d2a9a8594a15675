"""A DataLoader with forked workers, beside a group."""

import pytest

import tensorwire

torch = pytest.importorskip("torch")


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((100,), float(index * index))


class Uses(Squares):
    """Does what a worker must not do, and says what it got."""

    def __init__(self, group):
        self.group = group

    def __getitem__(self, index):
        try:
            self.group.all_reduce(torch.ones(3))
        except tensorwire.MisuseError as error:
            return str(error)
        return "no error"


@pytest.fixture
def group(tmp_path):
    yield tensorwire.init(f"file://{tmp_path}/meet", rank=0, world=1, timeout=60)
    tensorwire.finalize()


def loader(data):
    return torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork")


def test_workers_do_not_disturb(group):
    total = torch.zeros(100)
    for batch in loader(Squares()):
        part = batch.sum(0)
        group.all_reduce(part)
        total += part
    assert (total == sum(index * index for index in range(64))).all()
    group.barrier()


def test_use_in_a_worker_is_a_clear_error(group):
    answers = [text for batch in loader(Uses(group)) for text in batch]
    assert len(answers) == 64 and all("fork" in text for text in answers), answers[0]
    group.barrier()
