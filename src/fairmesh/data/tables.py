"""Tables of a user's own: reading a file, and the values of a column as numbers or categories."""

import contextlib
import csv
import datetime
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from fairmesh.errors import BadInput, in_a_line, listed, optional, suggestion

Kind = Literal["number", "yes-no", "date", "category"]
KINDS: tuple[str, ...] = get_args(Kind)
SUFFIXES = (".csv", ".parquet")  # of a table's file
MISSING_WORDS = ("", "na", "n/a", "nan", "null", "none")  # how tables write a missing value, in any case of letters
YES_WORDS, NO_WORDS = ("yes", "y", "true", "t", "1", "1.0"), ("no", "n", "false", "f", "0", "0.0")
CATEGORIES_AT_MOST = 100  # of a column; with more, it is a text or an identifier
LARGEST = 1e15  # of numbers in a table
NAME_AT_MOST = 200  # characters of the name of a column, a category or a label
_FEW_TEXTS = 20  # different texts that a column may have although almost every row has another one
_SHOWN = 3  # rows of one complaint
_EPOCH = datetime.date(1970, 1, 1).toordinal()
_ISO_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ].*)?")
_OTHER_DATE = re.compile(r"\d{1,2}[./]\d{1,2}[./]\d{2,4}|\d{4}[./]\d{1,2}[./]\d{1,2}")
_WITH_COMMA = re.compile(
    r"[-+]?\d+(,\d+)+(\.\d+)?|[-+]?\d+(\.\d{3})*,\d+|[-+]?\d{1,3}([ '\u00a0\u202f]\d{3})+([.,]\d+)?"
)
_WITH_ZEROS = re.compile(r"-?\d{1,18}\.0*")  # a whole number with decimals
_WITH_UNIT = re.compile(r"[-+]?\d+(?:[.,]\d+)?\s*([^\d\s.,;:-][^\d.,;:]*)")


def read_table(path: str | Path) -> dict[str, np.ndarray]:
    """Returns the columns of a .csv or .parquet file, by name, as the file has them.

    Args:
        path: The path of the file.

    Raises:
        BadInput: The file cannot be read as a table; the message says why and what to do.

    Example:
        >>> import pathlib, tempfile
        >>> import fairmesh as fm
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "rows.csv")
        ...     _ = path.write_text("age,ward\\n50,north\\n,south\\n")
        ...     fm.data.read_table(path)["age"].tolist()
        ['50', '']
    """
    path = Path(path)
    if path.suffix.lower() == ".parquet":
        return _parquet(path)
    if path.suffix.lower() != ".csv":
        raise BadInput(f"{path}: a table is a .csv or a .parquet file")
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            header, *rows = [row for row in csv.reader(lines) if row] or [[]]
    except UnicodeDecodeError as error:
        raise BadInput(f"cannot read {path}: it is not UTF-8 text ({error.reason}); save it as CSV in UTF-8") from error
    except (OSError, csv.Error) as error:
        raise BadInput(f"cannot read {path}: {_why(path, error)}") from error
    if len(header) == 1 and (";" in header[0] or "\t" in header[0]):
        what = "semicolons" if ";" in header[0] else "tabs"
        raise BadInput(f"{path}: its values are separated by {what}; save it with commas, and a point for decimals")
    if not rows:
        raise BadInput(f"{path} needs a header and rows below it")
    names = [name.strip() for name in header]
    for k, name in enumerate(names):
        if not name:
            raise BadInput(f"{path}: column {k + 1} has no name in the header; give it one")
        if name in names[:k]:
            raise BadInput(f"{path}: two columns are called {name!r}; rename one")
    for i, row in enumerate(rows):
        if len(row) != len(header):
            raise BadInput(
                f"{path}: row {i + 1} has {len(row)} values, but the header names {len(header)} columns; put a value "
                "with a comma in it, such as a decimal comma, in quotes, or write a point"
            )
    return {name: np.array(values) for name, values in zip(names, zip(*rows))}


def _parquet(path: Path) -> dict[str, np.ndarray]:
    with optional("parquet"):
        from pyarrow import ArrowException, parquet
    try:
        table = parquet.read_table(path)
    except (ArrowException, OSError) as error:
        raise BadInput(f"cannot read {path}: {_why(path, error)}") from error
    if not table.num_rows:
        raise BadInput(f"{path} has no rows")
    return {name.strip(): table.column(name).to_numpy() for name in table.column_names}


def _why(path: Path, error: Exception) -> str:
    """Returns why a file cannot be read, and where a relative path was looked for."""
    if not isinstance(error, FileNotFoundError):
        return in_a_line(error)
    return "there is no such file" + ("" if path.is_absolute() else f"; the path is relative to {Path.cwd()}")


def column_of(columns: Mapping[str, Any], name: str, where: str) -> np.ndarray:
    """Returns one column. Refuses one that is missing, with the nearest name and what there is."""
    if name not in columns:
        shown = ", ".join(list(columns)[:20]) + (", ..." if len(columns) > 20 else "")
        raise BadInput(f"{where} has no column {name!r}{suggestion(name, columns)}; it has {shown}")
    return np.asarray(columns[name])


def rows_in_words(which: np.ndarray) -> str:
    """Returns the rows of a mask in words, numbered from 1 as the rows below a header."""
    numbers = (np.flatnonzero(which) + 1).tolist()
    return f"row{'s' if len(numbers) > 1 else ''} {listed(numbers, _SHOWN)}"


# Single values


def is_missing(value: Any) -> bool:
    """Returns whether a value of a table is missing."""
    return value is None or value != value or str(value).strip().lower() in MISSING_WORDS


def number_in(value: Any) -> float:
    """Returns a value as a number, NaN if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def parsed(values: np.ndarray, kind: str = "number") -> tuple[np.ndarray, np.ndarray]:
    """Returns the values as numbers, NaN where they are none of the kind, and which of them are missing."""
    if kind == "number":
        with contextlib.suppress(TypeError, ValueError):
            numbers = np.array(values, np.float64)  # quick, but only if all values are numbers
            return numbers, np.isnan(numbers)
    read, missing = _AS_NUMBER[kind][0], missing_in(values)
    return np.array([math.nan if gone else read(v) for v, gone in zip(values.tolist(), missing)], np.float64), missing


def missing_in(values: np.ndarray) -> np.ndarray:
    """Returns which of the values are missing."""
    if values.dtype.kind in "fiub":
        return np.isnan(values)
    return np.array([is_missing(value) for value in values.tolist()], bool)


def no_value(where: str, name: str, values: np.ndarray, missing: np.ndarray) -> str:
    """Returns that a column has missing values where none may be missing, and what to do."""
    rows, first = rows_in_words(missing), str(values[int(missing.argmax())])
    return (
        f"{where}, column {name!r}, {rows}: {first!r} is no value, but none may be missing; fill or leave out the rows"
    )


def with_gaps(values: np.ndarray, markers: Sequence[str | float]) -> np.ndarray:
    """Returns a column in which the values that stand for a missing one are missing. Numbers are compared as numbers,
    so that "-9" also stands for -9.0."""
    texts = set(map(category_text, markers))
    numbers = {number for number in map(number_in, markers) if not math.isnan(number)}
    if values.dtype.kind in "fiub":
        gone = np.isin(values, list(numbers))
        return np.where(gone, np.nan, values) if gone.any() else values
    gone = [category_text(value) in texts or number_in(value) in numbers for value in values.tolist()] if texts else []
    if not any(gone):
        return values
    made = values.astype(values.dtype if values.dtype.kind == "U" else object)
    made[np.array(gone)] = "" if values.dtype.kind == "U" else None
    return made


def category_text(value: Any) -> str:
    """Returns a category as it is compared: without blanks around it, and a whole number without decimals, so that 4
    and 4.0 are one."""
    if isinstance(value, float | np.floating) and value == round(value) and abs(value) < 1e15:
        return str(int(value))
    text = str(value).strip()
    return text.partition(".")[0] if _WITH_ZEROS.fullmatch(text) else text


def two_spellings(texts: Iterable[str]) -> str:
    """Returns that two different texts are the same number, as 4 and 04 are; nothing if there are none."""
    by_number: dict[float, str] = {}
    for text in dict.fromkeys(texts):
        number = number_in(text)
        if not math.isnan(number) and (other := by_number.setdefault(number, text)) != text:
            return f"{other!r} and {text!r} count as two; write them in the same way"
    return ""


def whole_number_text(value: Any) -> str:
    """Returns a label as a table's `classes` names it: a category, whole numbers without leading zeros."""
    text = category_text(value)
    return str(int(text)) if re.fullmatch(r"-?\d{1,18}", text) else text


def in_order(labels: Sequence[str] | set[str]) -> tuple[str, ...]:
    """Returns labels in the order of their numbers: by size if all are whole numbers, else by name."""
    texts = {whole_number_text(label) for label in labels}
    whole = all(re.fullmatch(r"-?\d+", text) for text in texts)  # what `int` reads
    return tuple(sorted(texts, key=int) if whole else sorted(texts))


def numbered_labels(texts: Sequence[str], classes: Sequence[str], where: str) -> np.ndarray:
    """Returns the place of each label among the classes.

    Raises:
        BadInput: A label is not among the classes; the message names rows and value.
    """
    place = {name: k for k, name in enumerate(classes)}
    unknown = np.array([text not in place for text in texts], bool)
    if unknown.any():
        raise BadInput(
            f"{where}, {rows_in_words(unknown)}: the label {str(texts[int(unknown.argmax())])!r} is not among classes "
            f"= {list(classes)}; correct it, or add it to classes"
        )
    return np.array([place[text] for text in texts], np.int64)


def _day(value: Any) -> float:
    """Returns a date as the number of days since 1970-01-01, NaN if it is none."""
    text = str(value).strip()
    if not _ISO_DATE.fullmatch(text):
        return math.nan
    try:
        return float(datetime.date.fromisoformat(text[:10]).toordinal() - _EPOCH)
    except ValueError:
        return math.nan


def _yes(value: Any) -> float:
    text = str(value).strip().lower()
    return 1.0 if text in YES_WORDS else 0.0 if text in NO_WORDS else math.nan


_AS_NUMBER: dict[str, tuple[Callable[[Any], float], str]] = {  # how a value of a kind is read, and what it must be
    "number": (
        number_in,
        f"a finite number up to {LARGEST:g}; write a point for decimals, no other separators and no unit",
    ),
    "yes-no": (_yes, "yes or no, true or false, 1 or 0"),
    "date": (_day, "a date such as 2026-11-30"),
}


# Columns


def kind_of(values: np.ndarray, name: str, where: str) -> Kind:
    """Returns what a column has: numbers, yes and no, dates (2026-11-30) or categories.

    Raises:
        BadInput: It has some numbers and some texts, or numbers in a form that is not understood.
    """
    if values.dtype.kind in "fiu":
        return "number"
    known = [value for value in values.tolist() if not is_missing(value)]
    if not known:
        return "number"
    if all(isinstance(value, bool) for value in known):
        return "yes-no"
    distinct = list(dict.fromkeys(map(str, known)))
    numeric = [not math.isnan(number_in(value)) for value in distinct]
    candidates: tuple[Kind, ...] = ("number",) if any(numeric) else ("yes-no", "date")
    for kind in candidates:
        if not any(math.isnan(_AS_NUMBER[kind][0](value)) for value in distinct):
            return kind
    _refuse_odd_numbers(values, name, where, distinct)
    if any(numeric):
        counts = Counter(not math.isnan(number_in(value)) for value in known)
        odd = counts[False] <= counts[True]
        unlike = list(dict.fromkeys(str(value) for value in known if math.isnan(number_in(value)) == odd))
        some = (
            f"is unlike {counts[odd]:,} other values, which are {'numbers' if odd else 'texts'}; correct it or leave it"
        )
        marker = f', say missing_values = {{ "{name}" = {json.dumps(unlike)} }} if it stands for a missing value'
        remedy = f'empty{marker if odd and len(unlike) <= _SHOWN else ""}, or say types = {{ "{name}" = "category" }}'
        raise BadInput(_at_first(values, name, where, unlike[0], f"{some} {remedy} if the column has categories"))
    return "category"


def _refuse_odd_numbers(values: np.ndarray, name: str, where: str, distinct: Sequence[str]) -> None:
    """Refuses a column of texts that were meant as numbers or dates."""
    texts = [text.strip() for text in distinct]
    for form, what, remedy in (
        (_WITH_COMMA, "a number with a comma or with separated thousands", "write a point for decimals and no others"),
        (_OTHER_DATE, "a date", "write dates as 2026-11-30"),
    ):
        meant = [form.fullmatch(text) is not None for text in texts]
        rest = (text for text, one in zip(texts, meant) if not one)
        if any(meant) and all(not math.isnan(number_in(text)) for text in rest):
            raise BadInput(_at_first(values, name, where, distinct[meant.index(True)], f"looks like {what}; {remedy}"))
    units = [_WITH_UNIT.fullmatch(text) for text in texts]
    if len(texts) > _SHOWN and all(units) and len({unit[1].strip() for unit in units if unit}) == 1:
        raise BadInput(_at_first(values, name, where, distinct[0], "is a number with a unit; write numbers only"))


def _at_first(values: np.ndarray, name: str, where: str, text: str, said: str) -> str:
    row = next(i for i, value in enumerate(values.tolist()) if str(value) == text)
    return f'{where}: row {row + 1} of column {name!r} is {text!r}, which {said}, or leave it out: exclude = ["{name}"]'


def refuse_many_categories(values: np.ndarray, name: str, where: str) -> None:
    """Refuses a column of categories that has too many, or another one in almost every row."""
    known = [category_text(value) for value in values.tolist() if not is_missing(value)]
    distinct = len(set(known))
    advice = f'leave it out: exclude = ["{name}"]'
    if distinct > max(_FEW_TEXTS, len(known) / 2):
        raise BadInput(
            f"{where}: column {name!r} has {distinct:,} different texts in {len(known):,} rows, as an identifier or a "
            f"remark has; {advice}"
        )
    if distinct > CATEGORIES_AT_MOST:
        raise BadInput(
            f"{where}: column {name!r} has {distinct:,} categories, more than {CATEGORIES_AT_MOST}; join rare ones, or "
            f"{advice}"
        )


def absent(column: np.ndarray) -> np.ndarray:
    """Returns which values of a column are missing, as `encoded` returns it."""
    return np.array([value is None for value in column], bool) if column.dtype == object else np.isnan(column)


def encoded(values: Any, kind: Kind, name: str, where: str) -> np.ndarray:
    """Returns a column as float64 with NaN for missing values, or, of categories, as texts with None for them.

    Raises:
        BadInput: A value does not fit the kind; the message names the first row.
    """
    values = np.asarray(values)
    if kind == "category":
        return np.array([None if is_missing(v) else category_text(v) for v in values.tolist()], object)
    numbers, missing = parsed(values, kind)
    odd = ~missing & ~(np.abs(numbers) <= LARGEST)
    if odd.any():
        row = int(odd.argmax())
        raise BadInput(
            f"{where}: row {row + 1} of column {name!r} is {str(values[row])!r}, not {_AS_NUMBER[kind][1]}; correct it "
            "or leave it empty"
        )
    return numbers
