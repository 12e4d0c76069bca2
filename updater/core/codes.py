"""Every code of an error: HTTP status, meaning, whether to try again, and the usual way out.

`python -m updater.core.codes > docs/errors.md` writes the page. One row is one code; nothing else lists them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Code:
    """`status`: of HTTP. `retry`: whether the same request may succeed without a change by the caller.

    `hint`: the way out where a failure of this code names no closer one; empty where there is none to name.
    """

    status: int
    meaning: str
    retry: bool = False
    hint: str = ""


#: 409 busy or wrong phase, 412 version preconditions, 422 refused content, 424 a rank or replica failed, 503 not now.
TABLE: dict[str, Code] = {
    # requests
    "bad_request": Code(400, "The request, or an argument of a call, is not one that is understood."),
    "unauthorized": Code(
        401, "No token, or a wrong one.", hint="set LIVEWEIGHTS_ADMIN_TOKEN, or send Authorization: Bearer TOKEN"
    ),
    "forbidden": Code(
        403,
        "The token does not open this route; or, where none is configured, a page or a name of elsewhere called.",
        hint="use the admin token",
    ),
    "address_refused": Code(
        403,
        "The coordinator does not speak to a replica at this address.",
        hint="start the coordinator with --allow-network, or let the replica announce another address",
    ),
    "not_found": Code(404, "No such route, update, replica or manifest."),
    "method_not_allowed": Code(405, "The route exists, with another method."),
    "body_too_large": Code(
        413, "The body is larger than the route takes.", hint="upload a large manifest to /v1/manifests/SHA256 first"
    ),
    "unsupported_media_type": Code(
        415, "The body is not said to be JSON.", hint="pass the header Content-Type: application/json"
    ),
    "id_reused": Code(
        422, "An update of this id exists, with another body.", hint="leave the id out, or choose one that is not used"
    ),
    "busy": Code(409, "Another update is under way.", retry=True, hint="on_busy=wait waits for it, supersede ends it"),
    "wrong_phase": Code(409, "The update, or the replica, is in a phase that does not allow this.", retry=True),
    "superseded": Code(409, "A newer update, with on_busy=supersede, took the place of this one.", retry=True),
    "replica_id_taken": Code(
        409,
        "A living process has this replica id.",
        hint="start with another --replica name, or end the process that has it",
    ),
    "member_blocked": Code(
        409,
        "A member that is lost or quarantined blocks the next publication.",
        retry=True,
        hint="wait for it, `liveweights readmit` it, or once it is dead remove it with "
        "DELETE /v1/fleet/replicas/ID?confirm_dead=true",
    ),
    "version_not_served": Code(409, "The replica does not serve the version that the request needs.", retry=True),
    "stale_version": Code(
        412,
        "The version does not exceed the highest decided one of its run.",
        hint="publish a higher step, or open the next run with new_run (push and watch: --new-run)",
    ),
    "base_mismatch": Code(
        412, "Another version is live than base_version says.", hint="look at /v1/version, or leave base_version out"
    ),
    "dtypes_changed": Code(
        409,
        "The fleet does not hold the dtypes any more that the trainer read before it rounded: a replica joined.",
        retry=True,
        hint="push again: the dtypes are read anew",
    ),
    "expected_mismatch": Code(
        412, "Another version is live than expected_live says.", hint="look at /v1/version, or leave expected_live out"
    ),
    "no_rollback": Code(
        412, "Not every member holds the version to go back to.", hint="publish that checkpoint as the next version"
    ),
    "adopt_needed": Code(
        412,
        "The fleet has a history that the journal of this coordinator does not know.",
        hint="start the coordinator on the journal of the fleet (--state); if that is lost: liveweights adopt",
    ),
    "no_members": Code(
        503, "No replica serves yet.", retry=True, hint="start one: liveweights engine MODEL --coordinator URL"
    ),
    "mode_unsupported": Code(422, "The policy asks for what the engine, or its combination, does not allow."),
    "transport_unsupported": Code(
        422,
        "The fleet, or this machine, cannot use this transport.",
        hint="push by another one: disk, broadcast or shared_memory (--transport)",
    ),
    "adapter_unsupported": Code(
        422,
        "The source is an adapter, not a model.",
        hint="merge it into its base first (peft: merge_and_unload), or push the model itself from Python",
    ),
    # sources: files
    "source_ambiguous": Code(
        422,
        "A folder names the same tensors in its index and in another file.",
        hint="name the file or the index file, or remove the other one",
    ),
    "source_outside_roots": Code(
        422,
        "The path is not absolute, or lies under no configured root.",
        hint="start the coordinator and the replicas with --root DIR",
    ),
    "source_missing": Code(
        422,
        "Nothing that can be read as a checkpoint lies at the path.",
        hint="the coordinator and every replica read the path: it has to lie where all of them see it",
    ),
    "source_changed": Code(
        422, "The source was written to while it was read.", hint="publish it again once its writer has ended"
    ),
    "file_truncated": Code(422, "A file is shorter than its header says.", hint="write it again, or wait until it is"),
    "file_header": Code(422, "The header of a file is not one of safetensors."),
    "file_dtype": Code(422, "A file has a dtype that safetensors does not know."),
    "file_range": Code(422, "A header gives a tensor bytes that do not fit its shape or the file."),
    "file_duplicate": Code(422, "One name is given twice in a header or by two files."),
    "index_mismatch": Code(422, "The index and the files that it names do not agree."),
    "shard_missing": Code(422, "The index names a file that is not there.", hint="wait until its writer has ended"),
    "read_failed": Code(424, "The operating system could not read a file.", retry=True),
    # sources: streams
    "stream_mismatch": Code(422, "What the sender sent is not what its plan or the manifest says."),
    "peer_lost": Code(424, "A sender or receiver of the stream went away.", retry=True),
    "peer_timeout": Code(424, "A sender or receiver of the stream did not answer in time.", retry=True),
    # content
    "manifest_invalid": Code(422, "The manifest cannot be read.", hint="liveweights manifest DIR writes it anew"),
    "manifest_mismatch": Code(
        422,
        "The bytes are not those that the manifest promises.",
        hint="if the checkpoint is right and its manifest is old: liveweights manifest DIR writes it anew",
    ),
    "manifest_required": Code(
        422,
        "The policy or the transport asks for digests, and there is no manifest that has them.",
        hint="write one: liveweights manifest DIR",
    ),
    "config_mismatch": Code(
        422,
        "The checkpoint's config, tokenizer or quantisation is not that of the engine.",
        hint="allow_config=[KEY] (--allow-config KEY) takes it all the same; the engine keeps its own value",
    ),
    "config_required": Code(
        422,
        "The policy asks for a config that is compared, and the source or the engine has none.",
        hint="put config.json beside the weights, or name it with config_from",
    ),
    "tensor_missing": Code(422, "A tensor that the engine needs is not in the source."),
    "tensor_unexpected": Code(422, "The source has a tensor that no engine takes."),
    "tensor_duplicate": Code(422, "Two tensors of the source have one name."),
    "tensor_shape": Code(422, "A tensor has another shape than the engine's."),
    "tensor_dtype": Code(422, "A tensor has a dtype that does not become the engine's by a rounding."),
    "tensor_narrowing": Code(
        422,
        "A tensor's dtype is wider than the engine's.",
        hint='pass dtypes={"*": "BF16"} to push, or allow_narrowing=[["F32", "BF16"]] (--narrow F32:BF16) for files',
    ),
    "tensor_nonfinite": Code(
        422, "A tensor holds NaN or infinity.", hint="allow_nonfinite (--allow-nonfinite) takes it all the same"
    ),
    "layout_unproved": Code(
        422,
        "A tensor fuses or splits what the spelling that was proved at start did not, and nothing says how it lies.",
        hint="say how it lies: layouts={GLOB: KIND} (--layout GLOB=KIND, or in the manifest)",
    ),
    "tensor_suspicious": Code(
        422,
        "A tensor holds no normal number while the live one does, and no digest vouches for it.",
        hint="allow_suspicious=[GLOB] takes it all the same",
    ),
    "tensor_digest": Code(
        422,
        "A tensor's bytes have another digest than was promised.",
        hint="copy or send it again; if its file was changed on purpose, write the manifest anew: liveweights manifest",
    ),
    "tensor_unwritten": Code(422, "Elements of a parameter would be written by nothing, or twice."),
    "placement_refused": Code(422, "The engine's layout of a tensor is not known well enough to write it."),
    "copies_differ": Code(422, "Copies of one element, on several ranks or under several names, are not equal."),
    # ranks and members
    "no_space": Code(424, "Not enough memory, or space on a disk.", retry=True),
    "rank_failed": Code(424, "A rank failed at what it was asked for.", retry=True),
    "rank_died": Code(424, "The process of a rank ended.", retry=True, hint="restart the replica"),
    "rank_steps_differ": Code(424, "The ranks of a replica did not stop at one step.", retry=True),
    "replica_lost": Code(
        424,
        "A replica does not answer.",
        retry=True,
        hint="wait for it or restart it; once it is dead: DELETE /v1/fleet/replicas/ID?confirm_dead=true",
    ),
    "replica_fenced": Code(424, "An older order, or one for another life of the replica, came too late.", retry=True),
    "replica_asleep": Code(424, "The engine is asleep.", retry=True, hint="wake the engine first"),
    "cache_not_reset": Code(424, "Keys and values of the old weights could not be dropped.", retry=True),
    "quiesce_timeout": Code(
        424,
        "Running requests did not end within quiesce_s.",
        retry=True,
        hint="raise quiesce_s, or choose in_flight abort or recompute (--in-flight)",
    ),
    "phase_timeout": Code(424, "A phase took longer than its deadline.", retry=True, hint="raise deadline_s"),
    "lease_expired": Code(409, "The client did not renew the update's lease.", retry=True, hint="raise lease_s"),
    "client_abort": Code(409, "A client ended the update.", retry=True),
    "coordinator_restarted": Code(503, "The coordinator was restarted before the update was decided.", retry=True),
    "release_mismatch": Code(
        409,
        "Two parts of the fleet are of different releases.",
        retry=True,
        hint="upgrade the coordinator first, then restart the replicas on its release, one by one",
    ),
    "no_source": Code(
        409,
        "The replica holds other weights than the fleet, and what is live cannot be read again.",
        retry=True,
        hint="publish the next version: the replica takes part; or restart it on a checkpoint of the live weights",
    ),
    "state_in_use": Code(
        409,
        "Another coordinator that lives, or stands still, has this state folder.",
        hint="end that one first, or start with --take-over: it then stops, and this one goes on with the fleet",
    ),
    "state_not_shared": Code(
        422,
        "A coordinator that may be restarted on another node needs a state folder that all nodes share.",
        hint="give Settings(state=...) an absolute folder on a shared disk",
    ),
    "state_ambiguous": Code(
        409,
        "The journal lies where an earlier release kept it, and this release would begin a new one elsewhere.",
        hint="start with --state and the folder of the journal",
    ),
    "journal_failed": Code(
        503, "The coordinator cannot write its journal, or does not own it any more.", retry=True, hint="see its log"
    ),
    "listening": Code(
        503,
        "The journal is empty: no replica is admitted until replicas of an older fleet would have called.",
        retry=True,
        hint="wait some seconds, or start the coordinator with --new-fleet",
    ),
    "behind": Code(
        503,
        "The coordinator's journal is not the newest of its fleet: it publishes nothing and admits no replica.",
        retry=True,
        hint="start the coordinator on the newest journal; if that is lost: liveweights adopt",
    ),
    "taken_over": Code(
        503,
        "Another coordinator leads the fleet: this one has stopped.",
        retry=True,
        hint="use the other coordinator",
    ),
    "orphaned": Code(
        503,
        "The replica was removed from its fleet and is shut.",
        retry=True,
        hint="it joins again by itself; without a coordinator: liveweights release",
    ),
    "shut": Code(503, "The server is shut: it starts, stops, or installs.", retry=True),
    "queue_full": Code(503, "Too many requests wait for a version or an opening.", retry=True),
    "aborted_by_update": Code(503, "An update with in_flight=abort ended the request.", retry=True),
    "unreachable": Code(503, "No answer came from the address.", retry=True),
    "internal": Code(500, "Something that was not foreseen; the log of the process has more."),
}

HEAD = """# Error codes

Generated by `python -m updater.core.codes > docs/errors.md`; do not edit by hand.

Every error is an RFC 9457 problem document (over HTTP), an exception of `updater.core.errors` (in Python), or a text
and an exit code (on the command line), with the same `code`, text and `hint`. `failures` lists the single failures,
each with the replica, rank, file and tensor that it concerns; `groups` has them by code, with a count, up to three
examples and the hint. A document holds the first 100 failures, the receipt of the update (`GET /v1/updates/ID`) the
first 1000; `failures_count` is the number of all.

Retry: whether the same request may succeed later without a change by you. The field `retryable` of an error says it of
that error: it may be true where the column says no, for example if one replica does not see a file yet that another
one reads whole. The hint is the usual one: a failure that knows a closer way out names that instead.
"""


def page() -> str:
    """docs/errors.md."""
    rows = ["| code | status | meaning | retry | hint |", "|---|---|---|---|---|"]
    rows += [
        f"| `{name}` | {row.status} | {row.meaning} | {'yes' if row.retry else 'no'} | {row.hint} |"
        for name, row in TABLE.items()
    ]
    return "\n".join((HEAD, *rows, ""))


if __name__ == "__main__":  # pragma: no cover
    print(page(), end="")
