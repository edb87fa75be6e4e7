// Package lab is a wing of packages that a user starts and reads.
//
//	command -> report, top, experiment    the launcher's side of each command
//	experiment                            grids of runs and their results
//	report                                pages of runs and experiments
//	top                                   a live view of a run
//	status                                the state of a run in a file, for top
package lab
