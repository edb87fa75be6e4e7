// Package gossip finds the agents of a job, and hints which of them may be lost. A few seeds are enough to find all.
// Its information may be late or wrong, so a reader must ask the agent itself before it acts.
//
//	members, err := gossip.Join(ctx, gossip.Config{Job: "7", Key: key, Self: self, Seeds: seeds, Transport: port})
//	<-members.Changed()
//	peers := members.Peers()
package gossip

// The package runs memberlist (SWIM) on one port, UDP and TCP, which other streams of the job may share. Packets and
// streams are encrypted with a key of the job and start with the job's label, so two jobs on one port stay separate. A
// guard drops other packets before memberlist reads them, and bounds the streams, bytes and time of unauthenticated
// peers. Encryption does not prevent replays: a replayed packet can make a departed agent appear for some seconds.
//
// Goroutines, and their ends:
//
//	seek         asks seeds until one answers; ended by Close
//	syncRandom   asks random members after the start; ended by Close
//	passPackets, passStreams  filter for the guard; ended by Close
//	screen       one per stream, reads its header; ends with that, or with a deadline
//	listen       of a Port, reads packets; ended by Shutdown, which Close of the members calls
//	accept       of a Port, accepts streams; ended by Close of the port
//	sort         one per stream, reads its first byte; ends with that, or with a deadline
//	memberlist's ended by Close; their waits for answers have deadlines
