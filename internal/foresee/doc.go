// Package foresee is a wing of packages that answer before a run starts.
//
//	plan     -> backend, planner, cost    decides a strategy; adds up a step, its memory and traffic
//	planner  -> ring                      runs the ring over recording devices
//	cost     -> planner                   measured costs, and the time that they predict
//	backend                               which attention backend a run gets
package foresee
