package comm

import "github.com/cprun/cprun/comm/internal/blame"

// PeerError says which peer a transfer failed on. It is what every other rank reports when one
// rank dies. Its fields are Rank, of the peer in the world group; Name, "rank 2 (pid 4711 on
// node-a)"; Op, what was waiting, "receive of 4096 bytes", or "" when nothing was; and Cause,
// one of the errors below or what another rank has said.
type PeerError = blame.PeerError

var (
	// ErrAborted is the cause of calls that failed because the group was aborted.
	ErrAborted = blame.ErrAborted
	// ErrPeerLost is the cause of a PeerError whose peer closed its connection without a
	// goodbye.
	ErrPeerLost = blame.ErrPeerLost
	// ErrDeadline is the cause of a PeerError whose transfer stood still for too long.
	ErrDeadline = blame.ErrDeadline
	// ErrPeerLeft is the cause of a PeerError whose peer has closed its side in good order
	// while something was still expected of it.
	ErrPeerLeft = blame.ErrPeerLeft
	// ErrMismatch is the cause of a PeerError whose peer sends another size than is
	// received, which means that the ranks do not make the same calls.
	ErrMismatch = blame.ErrMismatch
	// ErrClosed is what calls on a group get that this rank has closed.
	ErrClosed = blame.ErrClosed
	// ErrProtocol is the cause of a PeerError whose peer sent what no rank may send.
	ErrProtocol = blame.ErrProtocol
)

// IsRemote reports whether err is a victim's: its cause came from another rank, or is the
// loss or the silence of one. A launcher that looks for the rank which failed first passes
// over such errors as long as some rank reports one of its own.
func IsRemote(err error) bool { return blame.IsRemote(err) }
