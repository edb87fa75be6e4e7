// Package comm moves tensors between the ranks of a group: exchanges between neighbours for the
// ring, and collectives for everything else, behind one interface, Communicator. NewLocal joins
// ranks of one process, Connect the processes of one node or of several.
// Package comm/device joins GPUs on top of such a group.
//
// # Rooms
//
//	comm                  Communicator, Group, the collectives of the host, the constructors
//	comm/device           Group of GPUs: NCCL, and copy engines where they can
//	comm/copyengine       exchanges by the copy engines of one node's GPUs
//	comm/commtest         the suite that every Communicator passes
//	comm/internal/link    what a group stands on: Transport moves data, Roster knows who is there
//	comm/internal/local   that, in one process
//	comm/internal/wire    that, by sockets: frames, sealing, flow control, handshake, mesh, silence
//	comm/internal/shm     memory that two processes share, for the large messages of these
//	comm/internal/blame   errors, and who stopped among many that wait for each other
//	comm/internal/check   wrong arguments
//	comm/internal/pace    looking again and again
//	comm/internal/worldtest worlds of ranks for tests
//
// # Who needs whom
//
// An Exchange needs the peers that it names, in a ring two neighbours. In groups of up to 16 every
// collective needs all pairs: each part goes straight from the rank that has it to the rank that needs
// it. In larger ones a rank needs those at distances of powers of two, but for AllToAll. A world by
// sockets has the connections that this takes. See "Connections" in docs/architecture.md, and
// docs/network.md for those between nodes.
//
// # Lock order
//
// A mutex further down may be taken while one further up is held, and never the other way round.
// Of one line at most one is held at a time.
//
//	device.Group.issuing   one call at a time, from its order on the streams to its registration
//	kit.order              queueing on the compute stream; a copy engine has it as "using"
//	device.Group.events    the stream's events: read to use them, written to close the stream
//	device.Group.mu        calls in flight, cause of the end, children
//	Engine.mu              a copy engine's queues, lanes and calls
//	Group.mu               closed, children; keeps the order of calls while they are queued
//	ledger.mu              calls that are not over, for those who ask what is waited for
//	inbox.mu, peer.mu      messages on their way: of one receiving rank in process, of one connection
//	World.mu, sockets.mu   the cause of the failure, in process and by sockets; which peers there are
//	roster.mu              what ranks say of themselves
//	Standing.mu, Alarm.mu  whom this rank waits for; who is woken when another says so
//
// Below all of them are the mutexes of streams (tensor.HostStream, cuda.Stream) and of the exported
// allocations of a GPU (cudaCopies.mu), under which nothing of comm is called: a stream calls back
// (OnFail) with none of its locks held.
//
// A caller may wait with issuing held: until a call is over where 1,024 are in flight, and until NCCL
// has queued its call. It may stand in the driver with issuing, kit.order, events (for reading) and
// Engine.mu. A copy engine's call that fails tells the other ranks with kit.order held, for half a
// second at most. Nothing else waits for a device, a peer or a channel with a lock held. Those who end such waits do
// not need these locks: the watch of a device group takes neither issuing nor kit.order, that of a copy engine only
// tries Engine.mu, and the readers of sockets take none of the first five.
package comm
