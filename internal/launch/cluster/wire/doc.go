// Package wire has the authenticated connections between the agents of a job: TLS 1.3 between keys that
// the agents have made for themselves, proof on both sides of the job's key, frames of a bounded length,
// and a word now and then by which each knows that the other is there.
//
// Goroutines, and who ends them:
//
//	accept   one a Door, takes connections; ends with the listener
//	greet    one a connection that has not proven the key; ends with its handshake, after Patience at most
//	send     one a Link, writes its frames; ends with the link
package wire
