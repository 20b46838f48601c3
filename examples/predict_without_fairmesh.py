"""Predictions from a file that `fairmesh export` wrote, without fairmesh.

    python predict_without_fairmesh.py exported.onnx patients.csv     # needs numpy and onnxruntime
    python predict_without_fairmesh.py exported.pt2 patients.csv      # needs torch

The file does the preprocessing: it takes the columns as they are in the table. Its metadata "fairmesh" says which ones,
and which classes the outputs belong to.
"""

import csv
import datetime
import json
import math
import re
import sys

import numpy as np

MISSING = ("", "na", "n/a", "nan", "null", "none")
YES = ("yes", "y", "true", "t", "1", "1.0")


def load(file):
    """Returns a function from inputs to outputs, and the description in the file."""
    if file.endswith(".onnx"):
        import onnxruntime

        session = onnxruntime.InferenceSession(file)
        about = session.get_modelmeta().custom_metadata_map["fairmesh"]
        return lambda inputs: session.run(None, {"inputs": inputs})[0], json.loads(about)
    import torch

    extra = {"fairmesh.json": ""}
    module = torch.export.load(file, extra_files=extra).module()
    return lambda inputs: module(torch.from_numpy(inputs)).detach().numpy(), json.loads(extra["fairmesh.json"])


def number(text, column):
    """Returns a value of the table as the model takes it."""
    text = re.sub(r"^(-?\d+)\.0*$", r"\1", text.strip())  # 4.0 is 4
    if text.lower() in MISSING or text in column["missing_values"]:
        return math.nan
    if column["kind"] == "category":
        return column["categories"].index(text) if text in column["categories"] else -1
    if column["kind"] == "yes-no":
        return float(text.lower() in YES)
    if column["kind"] == "date":
        return (datetime.date.fromisoformat(text[:10]) - datetime.date(1970, 1, 1)).days
    return float(text)


def main(file, table):
    run, about = load(file)
    columns, classes = about["input"]["columns"], about["output"]["classes"]
    with open(table, encoding="utf-8-sig", newline="") as lines:
        rows = list(csv.DictReader(lines))
    outputs = run(np.array([[number(row[column["name"]], column) for column in columns] for row in rows], np.float64))
    writer = csv.writer(sys.stdout)
    writer.writerow(["prediction", *classes])
    for row in outputs:
        writer.writerow([classes[int(row.argmax())], *row.tolist()] if classes else row.tolist())


if __name__ == "__main__":
    main(*sys.argv[1:])
