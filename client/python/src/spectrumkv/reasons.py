"""One exception for each reason that a daemon gives: `except reasons.STALE_EPOCH`.

The reason is the stable name in google.rpc.ErrorInfo. What is raised is also of the class of its code (errors.NotFound),
and a TransferFailed where it is the end of a transfer. A reason of a later daemon that is not here is told by code and
`reason` alone.
"""

from spectrumkv.errors import SpectrumKVError, register_reasons

# The names are those on the wire; one line for each, so that they can be read as a table.
# fmt: off
# ruff: noqa: E301, E302, E305, N801


# What was asked cannot be.
class AMBIGUOUS_ROLE(SpectrumKVError):
    """The daemon has both halves of the transfer: name the role."""
class BLOCK_TOO_LARGE(SpectrumKVError):
    """A block of one tensor is larger than a message may be."""
class BUDGET_TOO_SMALL(SpectrumKVError):
    """The allowed tiers cannot meet the budget; metadata has the least one."""
class CHUNK_TOO_LARGE(SpectrumKVError):
    """A token of all heads is larger than a chunk may be."""
class DROP_NOT_ALLOWED(SpectrumKVError):
    """The policy drops tokens without naming the tier DROP."""
class INVALID_ALLOCATOR(SpectrumKVError):
    """No such allocator."""
class INVALID_BATCH(SpectrumKVError):
    """Rows of scores or queries do not fit what they are of."""
class INVALID_BLOCKS(SpectrumKVError):
    """A block table is too short, names a block twice or a group that is not there."""
class INVALID_BUDGET(SpectrumKVError):
    """The budget is not in its range, or does not go with the rest of the policy."""
class INVALID_DECAY(SpectrumKVError):
    """decay_lambda is not a number in its range."""
class INVALID_LOG_LEVEL(SpectrumKVError):
    """No such level."""
class INVALID_MODE(SpectrumKVError):
    """No such mode of refinement."""
class INVALID_PART(SpectrumKVError):
    """A part that is none of its transfer, or does not fit the other parts; metadata names the field."""
class INVALID_PEER(SpectrumKVError):
    """The peer is no host:port."""
class INVALID_POLICY(SpectrumKVError):
    """Fields of the policy that do not go together."""
class INVALID_POOL_REF(SpectrumKVError):
    """The request names no pool."""
class INVALID_QUERIES(SpectrumKVError):
    """Recent queries that do not fit the pool or their positions."""
class INVALID_REQUEST_ID(SpectrumKVError):
    """The request id is empty or too long."""
class INVALID_ROLE(SpectrumKVError):
    """No such role."""
class INVALID_SCHEMA(SpectrumKVError):
    """The schema of the pool is wrong; metadata names the field."""
class INVALID_SCORES(SpectrumKVError):
    """Scores that are not finite, negative, or of another number than tokens."""
class INVALID_SELECTION(SpectrumKVError):
    """Tokens, layers or scores of a selection do not fit the transfer; metadata names the field."""
class INVALID_SHAPE(SpectrumKVError):
    """A shape that no pool has."""
class INVALID_TIERS(SpectrumKVError):
    """Tiers that are unknown, named twice, or too few."""
class INVALID_TOKEN(SpectrumKVError):
    """The transfer token is neither empty nor 16 bytes long."""
class INVALID_TRANSFER_ID(SpectrumKVError):
    """The transfer id is empty, too long, or has characters it may not have."""
class MESSAGE_TOO_LARGE(SpectrumKVError):
    """A message is larger than the daemon takes."""
class NOT_LAYERWISE(SpectrumKVError):
    """advance of a transfer that was not started layer by layer."""
class OUT_OF_RANGE(SpectrumKVError):
    """A value is out of its range; metadata names the field."""
class OVERLAP(SpectrumKVError):
    """Destinations overlap in memory."""
class UNKNOWN_ALLOCATOR(SpectrumKVError):
    """An allocator of a later version."""
class UNKNOWN_TIER(SpectrumKVError):
    """A tier of a later version."""
class UNSUPPORTED_DTYPE(SpectrumKVError):
    """A data type that this version does not take."""

# The memory of a pool.
class CUDA_NOT_AVAILABLE(SpectrumKVError):
    """The daemon has no GPU."""
class OUT_OF_MEMORY(SpectrumKVError):
    """The system has no memory for the pool."""
class SEGMENT_FAILED(SpectrumKVError):
    """The segment could not be used; the message says why."""
class SEGMENT_MAP_FAILED(SpectrumKVError):
    """The system refused to map the segment."""
class SEGMENT_NOT_FOUND(SpectrumKVError):
    """No segment of that name."""
class SEGMENT_NOT_OWNED(SpectrumKVError):
    """The segment belongs to another user."""
class SEGMENT_NOT_REGULAR(SpectrumKVError):
    """The segment is no regular file."""
class SEGMENT_NO_ACCESS(SpectrumKVError):
    """The daemon may not read and write the segment."""
class SEGMENT_OUTSIDE_DIR(SpectrumKVError):
    """The file lies outside memory.shared_dir."""
class SEGMENT_SPARSE(SpectrumKVError):
    """The segment has holes: populate it first."""
class SEGMENT_TOO_SHORT(SpectrumKVError):
    """The segment is shorter than the schema says, or was truncated."""

# Pools and their leases.
class LEASE_EXPIRED(SpectrumKVError):
    """Nobody renewed the lease in time: the pool is no more."""
class NOT_OWNER(SpectrumKVError):
    """The pool or transfer belongs to another caller."""
class POOL_BUSY(SpectrumKVError):
    """Transfers still use the pool."""
class POOL_CLOSING(SpectrumKVError):
    """The pool is being unregistered."""
class POOL_LOST(SpectrumKVError):
    """The pool that the transfer used is no more."""
class REQUEST_ID_REUSED(SpectrumKVError):
    """The request id was used with another schema."""
class STALE_EPOCH(SpectrumKVError):
    """The daemon has restarted: register again. Pools in shared memory do it by themselves."""
class UNKNOWN_BLOCK(SpectrumKVError):
    """No such block in the pool."""
class UNKNOWN_CALLER(SpectrumKVError):
    """The daemon cannot tell who calls."""
class UNKNOWN_PART(SpectrumKVError):
    """The transfer has no such part in this daemon."""
class UNKNOWN_POOL(SpectrumKVError):
    """No such pool in this daemon."""
class UNREGISTERED(SpectrumKVError):
    """The pool was unregistered."""
class WORKER_GONE(SpectrumKVError):
    """The worker that held the pool died."""

# Transfers.
class BAD_REFINE(SpectrumKVError):
    """A peer asked for a refinement that does not fit the source; daemons of this kind do not."""
class BLOCKS_REUSED(SpectrumKVError):
    """Blocks of the destination have been written or given to others since the commit: nothing lands in them."""
class EVENT_NOT_REACHED(SpectrumKVError):
    """The event that ApplyRefinement was to wait for was not reached in time; what is staged stays staged."""
class NOT_A_REFINEMENT(SpectrumKVError):
    """The transfer was not begun by Refine."""
class NOT_A_SOURCE(SpectrumKVError):
    """keep_in_cache was given for a receiver: only a sender has a source."""
class NOT_COMMITTED(SpectrumKVError):
    """Only a transfer that has committed here can be refined."""
class NOT_EXACT(SpectrumKVError):
    """All was refined to RAW, but the checksums of source and destination differ: one of them was written."""
class NOT_RETAINED(SpectrumKVError):
    """Nothing is kept to refine the transfer: it was not to be, or it is over."""
class NOT_STAGED(SpectrumKVError):
    """A DIRECT refinement has nothing to apply."""
class PEER_UNKNOWN(SpectrumKVError):
    """The daemon does not know where the source is: name the peer."""
class REFINEMENT_DROPPED(SpectrumKVError):
    """What the refinement had staged is gone: it failed, was cancelled or released."""
class RELEASED(SpectrumKVError):
    """A worker has released the transfer that was being refined."""
class STILL_RETAINED(SpectrumKVError):
    """Inside the daemon alone: what is retained must end before the transfer is forgotten."""
class APPLY_PENDING(SpectrumKVError):
    """Another ApplyRefinement of the refinement waits for its event, or is writing: ask again."""
class RETENTION_EVICTED(SpectrumKVError):
    """The daemon's cache needed the room of the retained source for others."""
class RETENTION_EXPIRED(SpectrumKVError):
    """The source is no longer retained."""
class RETENTION_OF_PARTS(SpectrumKVError):
    """A transfer of several parts cannot be refined."""
class RETENTION_PENDING(SpectrumKVError):
    """The source's half of the transfer has not ended yet: between daemons, tried again."""
class ALREADY_REPORTED(SpectrumKVError):
    """The time to first token was told before."""
class BLOCKS_IN_USE(SpectrumKVError):
    """Blocks are the source or destination of another transfer."""
class BLOCKS_RESERVED(SpectrumKVError):
    """Blocks are reserved for another transfer."""
class CANCELLED(SpectrumKVError):
    """The transfer was cancelled."""
class DEADLINE_EXCEEDED(SpectrumKVError):
    """The transfer or call did not end in its time."""
class DESTINATION_GONE(SpectrumKVError):
    """The receiving pool is no more."""
class DROP_NOT_ACCEPTED(SpectrumKVError):
    """The source drops tokens and the destination did not say accept_dropped."""
class KEY_NORM_UNAVAILABLE(SpectrumKVError):
    """Norms of keys are asked for, and the source has no keys to measure yet."""
class NO_COUNTERPART(SpectrumKVError):
    """The other half did not come in time."""
class OUTCOME_UNKNOWN(SpectrumKVError):
    """The receipt was lost and the receiver could not be asked: it may have committed."""
class SCHEMA_MISMATCH(SpectrumKVError):
    """The pools of both sides do not fit; metadata names the field."""
class SOURCE_CHANGED(SpectrumKVError):
    """Blocks were written while they were read."""
class SOURCE_MOVED(SpectrumKVError):
    """The retained source moves into its daemon's cache: ask for the refinement again."""
class SOURCE_GONE(SpectrumKVError):
    """The sending pool ended before it was written whole."""
class SUPERSEDED(SpectrumKVError):
    """A newer attempt or reservation took its place."""
class TOKEN_MISMATCH(SpectrumKVError):
    """The two halves have different transfer tokens."""
class TRANSFER_ACTIVE(SpectrumKVError):
    """The transfer is still under way."""
class TRANSFER_EXISTS(SpectrumKVError):
    """The transfer id is in use for another request."""
class TRANSFER_TERMINAL(SpectrumKVError):
    """The transfer has ended already."""
class UNKNOWN_TRANSFER(SpectrumKVError):
    """No such transfer in this daemon."""

# The daemon has no room, or takes nothing new.
class REFINE_STAGING_FULL(SpectrumKVError):
    """No room for refined cells that wait: refine.staging_bytes."""
class BYTES_QUOTA(SpectrumKVError):
    """This caller's share of memory for pools is used up."""
class DRAINING(SpectrumKVError):
    """The daemon takes no new work."""
class HOLDS_FULL(SpectrumKVError):
    """The daemon holds as many streams of pools as it may."""
class HOLDS_QUOTA(SpectrumKVError):
    """This caller's share of held pools is used up."""
class OUT_OF_THREADS(SpectrumKVError):
    """The daemon has no thread for the stream."""
class OWNED_QUOTA(SpectrumKVError):
    """This caller's share of the daemon's own memory is used up."""
class PLANS_FULL(SpectrumKVError):
    """The daemon has as many Plans under way as it may, or as it takes of one user."""
class POOLS_FULL(SpectrumKVError):
    """The daemon has as many pools as it may."""
class POOLS_QUOTA(SpectrumKVError):
    """This caller's share of pools is used up."""
class POOL_TRANSFERS_QUOTA(SpectrumKVError):
    """The pool has as many transfers as it may."""
class SEGMENTS_QUOTA(SpectrumKVError):
    """This caller's share of segments is used up."""
class SETTLING(SpectrumKVError):
    """Memory of a pool that closed is not given back yet."""
class SHUTTING_DOWN(SpectrumKVError):
    """The daemon is ending."""
class TRANSFERS_FULL(SpectrumKVError):
    """The daemon has as many transfers as it may."""
class TRANSFERS_QUOTA(SpectrumKVError):
    """This caller's share of transfers is used up."""
class WAITING_FULL(SpectrumKVError):
    """As many halves wait for the other as may."""

# Between daemons.
class BAD_MANIFEST(SpectrumKVError):
    """The peer's manifest contradicts itself or what was agreed."""
class BOTH_DIAL(SpectrumKVError):
    """Both halves want to dial: one side must expect or publish."""
class ENCODE_OVERFLOW(SpectrumKVError):
    """A bug: a chunk is larger than planned."""
class FENCE_MISMATCH(SpectrumKVError):
    """A chunk of another reservation."""
class IMPOSSIBLE_EVENT(SpectrumKVError):
    """A bug: an event that its state does not have."""
class MALFORMED_FRAME(SpectrumKVError):
    """Bytes of the peer that are no frame."""
class MANIFEST_MISMATCH(SpectrumKVError):
    """What arrived is not what the manifest says."""
class NOBODY_LISTENS(SpectrumKVError):
    """Nobody listens at the peer's address."""
class NOT_A_PEER(SpectrumKVError):
    """The address answers, but is no daemon."""
class NOT_RESOLVED(SpectrumKVError):
    """The peer's name has no address."""
class NO_HELLO(SpectrumKVError):
    """The peer did not open its stream in time."""
class NO_OPEN(SpectrumKVError):
    """The peer did not open its data stream in time."""
class PEER_CERTIFICATE(SpectrumKVError):
    """The peer's certificate is not accepted."""
class PEER_ERROR(SpectrumKVError):
    """The peer failed; the message has its words."""
class PEER_GAVE_UP(SpectrumKVError):
    """The peer ended its half."""
class PEER_GONE(SpectrumKVError):
    """The connection to the peer ended."""
class PEER_HANDSHAKE(SpectrumKVError):
    """The TLS handshake failed."""
class PEER_IDENTITY(SpectrumKVError):
    """The peer's certificate is of another daemon."""
class PEER_NOT_ALLOWED(SpectrumKVError):
    """The peer is not on the list."""
class PEER_REFUSED(SpectrumKVError):
    """The peer's host refuses the connection."""
class PEER_RESTARTED(SpectrumKVError):
    """The peer restarted during the transfer."""
class PEER_SECURITY_MISMATCH(SpectrumKVError):
    """One side speaks TLS, the other does not."""
class PEER_SILENT(SpectrumKVError):
    """The peer said nothing for the whole of the progress timeout."""
class PEER_UNREACHABLE(SpectrumKVError):
    """The peer's host cannot be reached."""
class PROTOCOL_VIOLATION(SpectrumKVError):
    """The peer broke a rule of the protocol."""
class STREAM_QUEUE_FULL(SpectrumKVError):
    """The peer does not read what was sent."""
class TOO_MANY_FRAMES(SpectrumKVError):
    """The peer sends more frames than it may."""
class UNKNOWN_SESSION(SpectrumKVError):
    """A data stream of an attempt that is not known."""
class UNSUPPORTED_VERSION(SpectrumKVError):
    """The peer speaks another version of the format."""


# GPUs.
class DEVICE_BUSY(SpectrumKVError):
    """The GPU or its driver is not ready yet."""
class DEVICE_ERROR(SpectrumKVError):
    """The GPU's driver refused a call; the message has its words."""
class DEVICE_FAILED(SpectrumKVError):
    """The GPU failed: the daemon uses it no more until it restarts."""
class DEVICE_TOO_OLD(SpectrumKVError):
    """The daemon has no code for this GPU."""
class DRIVER_TOO_OLD(SpectrumKVError):
    """The GPU's driver is older than the daemon needs."""
class HOST_FALLBACK_FORBIDDEN(SpectrumKVError):
    """The work would have to be done on the host, which the configuration forbids."""
class INVALID_IPC_HANDLE(SpectrumKVError):
    """The handle of GPU memory is none."""
class IPC_HANDLE_REFUSED(SpectrumKVError):
    """The driver does not open the handle of another process."""
class NO_DEVICE(SpectrumKVError):
    """The daemon sees no GPU."""
class NO_DRIVER(SpectrumKVError):
    """There is no GPU driver, or one that is too old."""
class NOT_ON_DEVICE(SpectrumKVError):
    """What is asked is not done on the GPU."""
class OUT_OF_DEVICE_MEMORY(SpectrumKVError):
    """The GPU has no memory for it now."""
class TOO_MANY_EVENTS(SpectrumKVError):
    """The worker has as many events open as it may."""
class UNKNOWN_DEVICE(SpectrumKVError):
    """The daemon has no GPU of this uuid."""


# The quality gate.
class INVALID_MODEL(SpectrumKVError):
    """The request names no model."""
class INVALID_TRIAL(SpectrumKVError):
    """An outcome of a trial that contradicts itself or was not asked for."""
class NO_REVISION(SpectrumKVError):
    """The pool names no revision of its model: no verdict could be kept for it."""
class NOT_A_TRIAL(SpectrumKVError):
    """The transfer is none that a probe may judge."""
class PROBES_FULL(SpectrumKVError):
    """As many probes are open as may be."""
class QUALITY_GATE_CLOSED(SpectrumKVError):
    """No verdict allows lossy tiers for this model yet."""
class UNKNOWN_PROBE(SpectrumKVError):
    """No such probe in this daemon."""
class VERDICTS_FILE(SpectrumKVError):
    """The file of verdicts cannot be read."""
class VERDICTS_FULL(SpectrumKVError):
    """The daemon keeps as many verdicts as it may."""
class VERDICTS_NOT_WRITTEN(SpectrumKVError):
    """The file of verdicts cannot be written."""



register_reasons(list(globals().values()))
