// Package lab is a wing of packages that a user starts and reads.
//
//	command -> report, top, verify        the launcher's side of each command
//	scale -> command, experiment, report  runs the cells of an experiment
//	experiment                            grids of runs and their results
//	verify                                the check of a run against its records
//	report                                pages of runs and experiments
//	top                                   a live view of a run
//	status                                the state of a run in a file, for top
package lab
