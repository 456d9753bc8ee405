"""The one error tree.

Every error a peer, an operator or a program can meet is a class here. Its ``code`` is stable: the wire, the
REST API, the logs and ``docs/protocol.md`` use the same word. ``str(error)`` is one sentence; ``remedy``, where
there is one, is a second sentence that says what to do.
"""

from __future__ import annotations

from typing import Any, ClassVar


class PagewardenError(Exception):
    """The root of the tree.

    ``details`` is a flat map of plain values (strings, numbers, booleans, lists of strings) that travels with the
    error over the wire and into the REST API's problem documents.
    """

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, remedy: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.details = details

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}" if self.remedy else self.message

    def to_wire(self) -> dict[str, Any]:
        """The map that stands under ``error`` in a reply."""
        return {
            "code": self.code,
            "message": self.message,
            "remedy": self.remedy,
            "retryable": self.retryable,
            "details": self.details,
        }


# --- start-up: the daemon exits with a non-zero status and the remedy ---------------------------------------


class StartupError(PagewardenError):
    """The daemon cannot start as it was asked to."""

    code = "startup"
    exit_status: ClassVar[int] = 1


class InvalidSettings(StartupError):
    """A flag, variable or line of the settings file has a value that cannot be used."""

    code = "invalid_settings"
    exit_status = 2


class PortInUse(StartupError):
    """Another process listens on the address asked for."""

    code = "port_in_use"
    exit_status = 3


class ArenaTooSmall(StartupError):
    """The mount or the memory limit of the cgroup is smaller than the L1 asked for."""

    code = "arena_too_small"
    exit_status = 4


class ArenaInUse(StartupError):
    """Another daemon holds the arena directory."""

    code = "arena_in_use"
    exit_status = 5


class ArenaUnusable(StartupError):
    """The arena directory cannot be created, read or written."""

    code = "arena_unusable"
    exit_status = 6


class CatalogUnreadable(StartupError):
    """The catalog file is no database, is damaged, is newer than this version, or cannot be opened."""

    code = "catalog_unreadable"
    exit_status = 7


class InsecureBind(StartupError):
    """A listener other than loopback was asked for without saying that this is meant."""

    code = "insecure_bind"
    exit_status = 8


class RunDirUnusable(StartupError):
    """The run directory cannot be created or written."""

    code = "run_dir_unusable"
    exit_status = 9


# --- protocol: a message is wrong in itself ------------------------------------------------------------------


class ProtocolError(PagewardenError):
    """A message does not follow the protocol."""

    code = "protocol"
    http_status = 400


class MalformedMessage(ProtocolError):
    """The frames or the MessagePack map of a message cannot be read."""

    code = "malformed_message"


class MessageTooLarge(ProtocolError):
    """A message is larger than the bound of its socket."""

    code = "message_too_large"
    http_status = 413


class UnsupportedVersion(ProtocolError):
    """The peer speaks another version of the protocol."""

    code = "unsupported_version"


class UnknownOperation(ProtocolError):
    """The message names no operation of this version."""

    code = "unknown_operation"


class InvalidField(ProtocolError):
    """A field of a message is missing, of the wrong type or out of its bounds."""

    code = "invalid_field"
    http_status = 422


# --- sessions: the peer must say hello, attach or register again -----------------------------------------------


class SessionError(PagewardenError):
    """The session of a request is not in a state that allows it."""

    code = "session"
    http_status = 409


class BootChanged(SessionError):
    """The request was meant for an earlier boot of the daemon: say hello again."""

    code = "boot_changed"
    retryable = True


class UnknownSession(SessionError):
    """The daemon holds no such session: it ended, or was never opened."""

    code = "unknown_session"
    retryable = True


class NotAttached(SessionError):
    """The operation needs a worker that has attached."""

    code = "not_attached"


class NotRegistered(SessionError):
    """The operation needs an engine whose namespace is settled."""

    code = "not_registered"
    retryable = True


class WrongRole(SessionError):
    """The operation belongs to another role than this session's."""

    code = "wrong_role"
    http_status = 403


class AttachmentNotProven(SessionError):
    """The attaching process does not hold the lock that would prove its death later."""

    code = "attachment_not_proven"


# --- registration ------------------------------------------------------------------------------------------------


class RegistrationError(PagewardenError):
    """An engine cannot be registered as it described itself."""

    code = "registration"
    http_status = 409


class PartialFingerprint(RegistrationError):
    """The fingerprint is empty or lacks a required field."""

    code = "partial_fingerprint"
    http_status = 422


class RanksDisagree(RegistrationError):
    """The ranks of one engine describe themselves in ways that cannot belong to one engine."""

    code = "ranks_disagree"


class NamespaceMismatch(RegistrationError):
    """The engine required a namespace that its fingerprint does not give."""

    code = "namespace_mismatch"


class UnsupportedGeometry(RegistrationError):
    """The cache groups of the engine cannot be served."""

    code = "unsupported_geometry"
    http_status = 422


# --- planning ----------------------------------------------------------------------------------------------------


class PlanningError(PagewardenError):
    """A deployment cannot be planned from what was given."""

    code = "planning"
    http_status = 422


class ModelConfigUnreadable(PlanningError):
    """No configuration of a model can be read where it was said to be."""

    code = "model_config_unreadable"


class UnsupportedModel(PlanningError):
    """A field of the model's configuration is missing, wrong, or of a family whose cache is not known."""

    code = "unsupported_model"


class PlanRefused(PlanningError):
    """An option of the plan has a value that cannot be used with this model."""

    code = "plan_refused"


# --- leases and reservations ------------------------------------------------------------------------------------


class HoldError(PagewardenError):
    """A hold on memory is not, or no longer, what the request takes it for."""

    code = "hold"
    http_status = 409


class LeaseEnded(HoldError):
    """The lease ended and some of its objects are gone; ``details`` names the chunks lost."""

    code = "lease_ended"
    http_status = 410


class ReservationEnded(HoldError):
    """The reservation ended, or is another session's: its bytes are not taken."""

    code = "reservation_ended"
    http_status = 410


class UnknownLease(HoldError):
    """No such lease was granted by this boot to this engine."""

    code = "unknown_lease"
    http_status = 404


# --- the daemon itself ----------------------------------------------------------------------------------------------


class Unavailable(PagewardenError):
    """The daemon cannot do this now."""

    code = "unavailable"
    http_status = 503
    retryable = True


class ShuttingDown(Unavailable):
    """The daemon is stopping and grants nothing new."""

    code = "shutting_down"


class CatalogUnavailable(Unavailable):
    """The catalog cannot be read or written now; a durable change is refused rather than forgotten."""

    code = "catalog_unavailable"


class DaemonUnreachable(Unavailable):
    """No answer came from the daemon within the wait asked for."""

    code = "daemon_unreachable"


class CheckFailed(Unavailable):
    """The consistency check could not look at what it checks."""

    code = "check_failed"


class NotFound(PagewardenError):
    """The thing named does not exist."""

    code = "not_found"
    http_status = 404


# --- access: who asks, from where, and what for ------------------------------------------------------------------


class AccessRefused(PagewardenError):
    """The request is not allowed as it stands."""

    code = "access_refused"
    http_status = 403


class NotAuthenticated(AccessRefused):
    """The request shows no login, token or secret that is valid now."""

    code = "not_authenticated"
    http_status = 401


class WrongCredentials(AccessRefused):
    """There is no such user with such a password."""

    code = "wrong_credentials"
    http_status = 401


class Forbidden(AccessRefused):
    """The role, or the token's scopes, do not include what was asked for."""

    code = "forbidden"


class CrossSite(AccessRefused):
    """A change was asked for by a page of another site."""

    code = "cross_site"


class ReadOnlyDashboard(AccessRefused):
    """The dashboard was started to show only."""

    code = "read_only"


class HostRefused(AccessRefused):
    """The request names a host that is not this process."""

    code = "host_refused"
    http_status = 421


class TooManyAttempts(AccessRefused):
    """Too many logins failed lately."""

    code = "too_many_attempts"
    http_status = 429
    retryable = True


# --- changes that do not fit what there is -----------------------------------------------------------------------


class ChangeRefused(PagewardenError):
    """The change does not fit what there is now."""

    code = "change_refused"
    http_status = 409


class AlreadyExists(ChangeRefused):
    """Something of that name exists."""

    code = "already_exists"


class LastAdmin(ChangeRefused):
    """Nobody could administer the daemon any more."""

    code = "last_admin"


class VersionRequired(ChangeRefused):
    """The change does not say which version it was made from."""

    code = "version_required"
    http_status = 428


class VersionChanged(ChangeRefused):
    """Somebody else made a change in between."""

    code = "version_changed"
    http_status = 412


class ArenaUnreachable(PagewardenError):
    """The client cannot map the arena that the daemon names."""

    code = "arena_unreachable"


class InvalidTrace(PagewardenError):
    """A recorded request trace cannot be replayed; the line and the field are named."""

    code = "invalid_trace"
    http_status = 400


def all_errors() -> dict[str, type[PagewardenError]]:
    """Every class of the tree by its code; a code that stands twice is a programming error."""
    found: dict[str, type[PagewardenError]] = {}
    queue: list[type[PagewardenError]] = [PagewardenError]
    while queue:
        cls = queue.pop()
        assert cls.code not in found, (
            f"{cls.__name__} and {found[cls.code].__name__} would be told apart by nobody"
        )
        found[cls.code] = cls
        queue.extend(cls.__subclasses__())
    return found


def from_wire(error: dict[str, Any]) -> PagewardenError:
    """The exception that a reply's ``error`` map describes; an unknown code gives the root class."""
    cls = all_errors().get(str(error.get("code")), PagewardenError)
    details = error.get("details")
    rebuilt = cls.__new__(cls)
    PagewardenError.__init__(rebuilt, str(error.get("message", "")), remedy=str(error.get("remedy", "")))
    if isinstance(details, dict):
        rebuilt.details = {str(key): value for key, value in details.items()}
    return rebuilt
