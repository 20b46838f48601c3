"""How the sites of a job become the members of a mesh: keys, certificates and the files of the run at each site.

The first site signs a certificate for each caller, in the name by which NVFlare knows the caller. Each site then shows
its certificate to each other one in a call of its own, and each keeps the key that it was shown: so neither the first
site nor anybody who passes announcements on can speak in another's name. What a site has is kept in its folder of the
run, for the next job of this run. NVFlare's server could call in any name, so the first job of a run is taken on trust;
later ones are refused if they bring other keys.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fairmesh.config.overrides import read_toml
from fairmesh.errors import BadInput, FairmeshError, Interrupted, in_a_line, listed
from fairmesh.mesh.enrol import certificates
from fairmesh.mesh.enrol.approval import approve, is_approved
from fairmesh.mesh.enrol.certificates import AUTHORITY, AUTHORITY_KEY
from fairmesh.mesh.enrol.keys import KnownKeys, record_signed, refuse_other_key
from fairmesh.mesh.enrol.manifest import MANIFEST, Handout, handed_out, seal, write_files
from fairmesh.mesh.enrol.roster import MESH, Mesh, SiteFile
from fairmesh.mesh.fields import shortened
from fairmesh.mesh.node.store import RESULT
from fairmesh.mesh.wire.frames import read_json
from fairmesh.nvflare.calls import CallFailed
from fairmesh.nvflare.job import Job
from fairmesh.storage.files import private_files, private_folder, read_bytes, write_atomically

SITE = "site.toml"
_FOUNDER = "founder"  # folder of the site that signs
_DAYS = 3652.0  # NVFlare's own certificates say who may take part, and until when
_CALL_S, _PAUSE_S = 20.0, 0.5
_AT_MOST = 1 << 16  # bytes of what another site shows or asks
_LOST = (
    "if a site has lost its folder of this run, let it put the folder back from a backup; else begin a new run: export "
    "the job with another --name"
)

Ask = Callable[[str, str, bytes, float], bytes]  # (site, method, what, within seconds) -> the answer


class Enrolment:
    """The membership of one site in a run.

    Args:
        home: The site's folder of this run.
        job: The job.
        mesh: The content of mesh.toml.
        contents: Those of the experiment's files.
        site: The name of this site.
        settings: What its site.toml has besides its files.
        report: Logs an event.
    """

    def __init__(
        self,
        home: Path,
        job: Job,
        mesh: bytes,
        contents: Mapping[str, bytes],
        site: str,
        settings: Mapping[str, Any],
        report: Callable[..., None],
    ):
        self.home, self._job, self._contents, self._site, self._report = home, job, contents, site, report
        self._mesh_text, self._founder = mesh, next(iter(job.sites))
        self._certificates: dict[str, bytes] = {}  # of all sites that have shown theirs in this job
        self._lock = threading.Lock()
        self._keys: KnownKeys | None = None  # once this site has its certificate
        self._signs = False  # once this site has its files, if it is the one that signs
        self.mesh = self._checked()
        self._site_table = {"name": site, "mesh": MESH, "engine": "nvflare", **settings}
        SiteFile.of(home / SITE, self._site_table)  # refuses what it does not know
        self._refuse_other_experiment()

    @property
    def site_file(self) -> Path:
        return self.home / SITE

    def certificate_of(self, site: str) -> bytes:
        """Returns the certificate that a site has shown."""
        return self._certificates[site]

    def signed(self, data: bytes) -> bytes:
        """Returns this site's signature of data."""
        return certificates.signature(read_bytes(self.home / f"{self._site}.key"), data)

    def signed_by(self, site: str, data: bytes, signature: bytes) -> bool:
        """Returns whether a site has signed the data, by the certificate that it has shown in this job."""
        shown = self._certificates.get(site)
        authority = self.home / AUTHORITY
        return shown is not None and certificates.verified(shown, read_bytes(authority), site, data, signature)

    def _checked(self) -> Mesh:
        """Returns the mesh of the job."""
        mesh = Mesh.of(read_toml(self._mesh_text.decode(errors="replace"), MESH), MESH)
        if (mesh.name, mesh.names) != (self._job.run, tuple(self._job.sites)):
            raise BadInput(f"the job's {MESH} is of other sites, or of another run; export the job and submit it again")
        return mesh

    def write(self) -> None:
        """Writes what the job brings, and makes this site's key. No other job of the run may be running here. Refuses
        another experiment than the run was begun with; one that has done no round here is replaced."""
        with private_files():
            private_folder(self.home)
            if self._refuse_other_experiment():
                self._forget()
            write_atomically(self.home / MESH, self._mesh_text)
            write_files(self.home, self._contents)
            write_atomically(self.home / SITE, tomli_w.dumps(self._site_table).encode())
            self._make_key()
            if self._site == self._founder:
                self._found()
                self._signs = True

    def _make_key(self) -> None:
        """Makes this site's key, unless there is one. The request is written last: without it, and without a
        certificate, a power cut has left a part of a key that nobody has seen."""
        if any((self.home / f"{self._site}{kind}").exists() for kind in (".csr", ".pem")):
            return
        key = self.home / f"{self._site}.key"
        key.unlink(missing_ok=True)
        secret = certificates.secret_of(key)
        if secret.exists() and not read_bytes(secret):
            secret.unlink()
        certificates.make_key(self.home, self._site)

    def _refuse_other_experiment(self) -> list[str]:
        """Returns what differs from an experiment that this run had here before, without having done a round."""
        before = self.home / MANIFEST
        if not before.exists():
            return []
        signed = json.loads(read_bytes(before))
        given = {name: digest for name, digest in self._job.files.items() if name != MESH}
        changed = [name for name in {**signed["files"], **given} if signed["files"].get(name) != given.get(name)]
        if (self.home / MESH).exists() and read_bytes(self.home / MESH) != self._mesh_text:
            changed.append("the sites or their graph")
        state = self.home / "state"
        if changed and ((state / RESULT).exists() or any(state.glob("generation-*/*"))):
            raise BadInput(
                f"the run {self._job.run} was begun here with another experiment; this is not the same there: "
                f"{listed(sorted(changed))}. To continue it, submit the job that it was begun with; for a new run, "
                "export the job with another --name"
            )
        return changed

    def _forget(self) -> None:
        """Removes what was agreed on for an experiment that has done no round. Keys stay as they are."""
        for path in (self.home / MANIFEST, self.home / f"{self._site}.pem", self.home / _FOUNDER / MANIFEST):
            path.unlink(missing_ok=True)

    def _found(self) -> None:
        """Makes the authority, unless there is one."""
        folder = self.home / _FOUNDER
        private_folder(folder)
        if not (folder / MANIFEST).exists():
            if not (folder / AUTHORITY).exists():  # which is written last
                (folder / AUTHORITY_KEY).unlink(missing_ok=True)
                certificates.make_authority(folder, self.mesh.name, _DAYS)
            self.mesh.write(folder / MESH)
            write_files(folder, self._contents)
            seal(folder, self.mesh, list(self._contents))

    # What other sites ask

    def sign(self, caller: str, request: bytes) -> bytes:
        """Returns, at the site that signs, what a site gets that asks for its certificate; b"" while it cannot sign."""
        if self._site != self._founder:
            raise BadInput(f"{self._site} signs no certificates; {self._founder} does")
        if not self._signs:
            return b""
        if len(request) > _AT_MOST or certificates.requested_name(request) != caller:
            raise BadInput(f"{caller} asks for the certificate of another site")
        folder, shown = self.home / _FOUNDER, certificates.fingerprint(request)
        with self._lock, private_files():
            try:
                refuse_other_key(folder, caller, shown)
            except BadInput as error:
                raise BadInput(f"{caller} asks for a certificate of another key than before: {_LOST}") from error
            made = self._signed_before(caller, shown) or self._sign(caller, request)
        given = {
            "certificate": made,
            AUTHORITY: read_bytes(folder / AUTHORITY),
            MANIFEST: read_bytes(folder / MANIFEST),
        }
        return json.dumps({name: content.decode() for name, content in given.items()}).encode()

    def _signed_before(self, site: str, shown: str) -> bytes:
        """Returns the certificate that a site got for this key, while it is valid; else b""."""
        path = self.home / _FOUNDER / f"{site}.pem"
        certificate = read_bytes(path) if path.exists() else b""
        authority = read_bytes(self.home / _FOUNDER / AUTHORITY)
        if not certificate or certificates.check_certificate(certificate, authority, site):
            return b""
        return certificate if certificates.fingerprint(certificate) == shown else b""

    def _sign(self, site: str, request: bytes) -> bytes:
        folder = self.home / _FOUNDER
        made = certificates.sign(request, folder, Mesh.read(folder / MESH), _DAYS)
        record_signed(folder, site, made)
        write_atomically(folder / f"{site}.pem", made)
        return made

    def shown(self, caller: str, certificate: bytes) -> bytes:
        """Takes the certificate that a site shows. Returns this site's own; b"" if it has none yet."""
        if self._keys is None:
            return b""
        self._keep(caller, certificate)
        return read_bytes(self.home / f"{self._site}.pem")

    def _keep(self, site: str, certificate: bytes) -> None:
        if len(certificate) > _AT_MOST:
            raise BadInput(f"{site} shows a certificate that is too large")
        wrong = certificates.check_certificate(certificate, read_bytes(self.home / AUTHORITY), site)
        refusal = "; ".join(wrong) or (self._keys.refusal(site, certificate) if self._keys else "")
        if refusal:
            self._report("warning", "a certificate is refused", site=site, reason=refusal)
            raise BadInput(f"{site} shows another certificate than this site expects: {_LOST}")
        self._certificates[site] = certificate

    # What this site asks

    def settle(self, ask: Ask, patience_s: float, stopped: Callable[[], None]) -> None:
        """Gets this site's certificate, and meets all others.

        Args:
            ask: Calls another site.
            patience_s: How long another site may not answer.
            stopped: Raises an error if the job has ended.
        """
        if not (self.home / f"{self._site}.pem").exists():
            request = read_bytes(self.home / f"{self._site}.csr")
            if self._site == self._founder:
                answer = self.sign(self._site, request)
            else:
                answer = self._asked([self._founder], ask, "enrol", request, patience_s, stopped)[self._founder]
            self._take_certificate(answer)
        site = SiteFile.read(self.site_file)
        handout = handed_out(site, Mesh.read(site.mesh))
        if not is_approved(site, handout):
            approve(site, handout)  # the site has accepted the job, and its own file says what may be in it
        private_folder(site.state)
        self._keys = KnownKeys(site.state, self._report)
        own = read_bytes(self.home / f"{self._site}.pem")
        self._keep(self._site, own)
        others = [name for name in self._job.sites if name != self._site]
        for name, certificate in self._asked(others, ask, "introduce", own, patience_s, stopped).items():
            self._keep(name, certificate)

    def _take_certificate(self, answer: bytes) -> None:
        try:
            given = {name: str(content).encode() for name, content in read_json(answer).items()}
            certificate, authority, manifest = given["certificate"], given[AUTHORITY], given[MANIFEST]
        except (ValueError, KeyError, AttributeError) as error:
            raise BadInput(f"{self._founder} does not send the certificate that was asked for") from error
        wrong = certificates.check_certificate(certificate, authority, self._site, key=self.home / f"{self._site}.key")
        if wrong:
            raise BadInput(f"the certificate that {self._founder} sent: {'; '.join(wrong)}")
        with private_files():
            write_atomically(self.home / AUTHORITY, authority)
            write_atomically(self.home / MANIFEST, manifest)
            mesh = self.home / MESH
            try:
                Handout.read(self.home / "experiment.toml", authority, Mesh.read(mesh), mesh)
            except BadInput as error:
                (self.home / MANIFEST).unlink()
                raise BadInput(f"{self._founder} has another job than this site: {error}") from error
            write_atomically(self.home / f"{self._site}.pem", certificate)

    def _asked(
        self,
        sites: Sequence[str],
        ask: Ask,
        method: str,
        what: bytes,
        patience_s: float,
        stopped: Callable[[], None],
    ) -> dict[str, bytes]:
        """Asks sites until each has answered."""
        answers: dict[str, bytes] = {}
        reached = dict.fromkeys(sites, time.monotonic())
        reasons = dict.fromkeys(sites, "no answer")
        while missing := [name for name in sites if name not in answers]:
            for name in missing:
                stopped()
                try:
                    answer = ask(name, method, what, _CALL_S)
                    reached[name] = time.monotonic()
                    if answer:
                        answers[name] = answer
                except CallFailed as error:
                    reasons[name] = in_a_line(error)
            late = [name for name in missing if time.monotonic() - reached[name] > patience_s]
            if late:
                why = "; ".join(f"{name}: {reasons[name]}" for name in late[:3])
                raise Missing(late, f"{listed(late)} did not answer for {patience_s:.0f} s ({why})")
            if len(answers) < len(sites):
                time.sleep(_PAUSE_S)
        return answers


class Missing(Interrupted):
    """Sites cannot be reached. What a later job needs is on disk."""

    def __init__(self, sites: Sequence[str], reason: str):
        super().__init__(reason)
        self.sites = list(sites)


def refused_in_words(error: FairmeshError) -> bytes:
    """Returns the answer to a site that asked in vain."""
    return json.dumps({"refused": str(error)[:1000]}).encode()


def read_answer(answer: bytes) -> bytes:
    """Returns an answer. Raises BadInput if it is a refusal."""
    if not answer.startswith(b'{"refused"'):
        return answer
    try:
        reason = shortened(str(read_json(answer)["refused"]), 1000)
    except (ValueError, KeyError, TypeError):
        reason = "for a reason that this site cannot read"
    raise BadInput(f"another site refuses this one: {reason}")
