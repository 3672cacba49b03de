"""The checker behind every annotation while the tests run; `pyproject.toml` names it.

beartype as it is, except that an int will do for a float, as Python's own typing rules say.
"""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
