"""Made-up visits of patients for examples/private.toml: every patient has one visit or several, all at one hospital."""

import torch

import fairmesh as fm

PATIENTS = (900, 700, 500, 400, 300)  # of each hospital
MEASUREMENTS = 12


def sites() -> list[fm.Site]:
    """Returns the hospitals. Of each, a fifth of the patients is for testing, with all their visits."""
    draws = torch.Generator().manual_seed(0)
    risk = torch.randn(MEASUREMENTS, generator=draws)
    made = []
    for i, patients in enumerate(PATIENTS):
        health = torch.randn(patients, MEASUREMENTS, generator=draws)
        ill = (health @ risk + 0.5 * torch.randn(patients, generator=draws) > 0.3 * (i - 2)).long()
        visits = torch.randint(1, 6, (patients,), generator=draws)
        patient = torch.arange(patients).repeat_interleave(visits)
        measured = health[patient] + 0.5 * torch.randn(len(patient), MEASUREMENTS, generator=draws)
        names = [f"hospital {i}, patient {number}" for number in patient.tolist()]
        site = fm.Site((measured, ill[patient]), units=names, unit="patient", name=f"hospital {'ABCDE'[i]}")
        made.append(site)
    return fm.data.split(made, test_share=0.2)
