// Package netsim is a network within one process, for tests of what agents of many hosts agree on.
// Its packets are lost and its streams are late, as told; hosts end, fall silent and are cut off.
//
// All waiting is by package time and by package sync, so it runs in a bubble of testing/synctest,
// where an hour of a thousand hosts takes minutes. Chance comes from a seed; the order in which the
// Go runtime runs goroutines does not.
package netsim
