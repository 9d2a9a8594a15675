"""What tensorwire logs, for tests."""

import logging


class Said(logging.Handler):
    """The lines that were logged. As a context it listens until its end."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("tensorwire").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("tensorwire").removeHandler(self)
