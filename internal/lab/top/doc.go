// Package top shows a run while it goes on: on a terminal as a picture that is drawn again where it has changed, and
// elsewhere as lines. It reads the run directory and nothing else, so that it works on another host of a shared file
// system, of a run that has ended, and of one whose launcher is dead.
//
//	source   reads: metrics.jsonl (follower), logs/status-0000.json (package status), logs/launcher.log
//	View     is what was read
//	Layout   makes lines of a View, for a width and a height
//	Live     draws them (tcell writes the cells that have changed), until a key or a signal
package top
