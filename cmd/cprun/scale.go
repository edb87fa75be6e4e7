package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/cprun/cprun/internal/lab/command"
	"github.com/cprun/cprun/internal/model/machine"
)

func scaleCommand() *cobra.Command {
	o := command.ScaleOptions{}
	c := &cobra.Command{
		Use:   "scale experiment.yaml",
		Short: "run a grid of configs, such as lengths by ranks by algorithms, to one report",
		Long: `Runs every cell of the grid that experiment.yaml lists, each as processes of its own,
and writes results.csv, results.json and report.html. A cell that fails, or for which
memory or time is too short, is a result. Repeating the command goes on where it was.`,
		Example: "  cprun scale examples/scale/opticks.yaml\n" +
			"  cprun scale examples/scale/opticks.yaml --out runs/scaling --set train.steps=20\n" +
			"  cprun scale examples/scale/h200.yaml --plan --assume arch=sm90,cudnn=9.10.2,memory=141G\n" +
			"  cprun scale examples/scale/h200.yaml --slurm --out /shared/scaling --sbatch=--partition=gpu " +
			"--sbatch=--gpus-per-node=8",
		Args: oneArg("an experiment"),
		RunE: func(c *cobra.Command, args []string) error {
			o.Args = os.Args
			return finish(command.Scale(args[0], o))
		},
	}
	f := c.Flags()
	f.StringVar(&o.Out, "out", "", "`directory` of the experiment (default runs/<name>-<time>, or the newest of "+
		"those that is not done)")
	f.StringVar(&o.Resume, "resume", "auto", "auto: resume what the directory has; never: begin anew, and remove it")
	f.BoolVar(&o.PlanOnly, "plan", false, "predict every cell, and run none")
	f.StringArrayVar(&o.Assume, "assume", nil, "with --plan: "+machine.AssumeHelp)
	f.BoolVar(&o.Slurm, "slurm", false, "submit the cells as one array of Slurm, and a job that gathers the results")
	f.StringArrayVar(&o.Sbatch, "sbatch", nil,
		"with --slurm: an `argument` of sbatch, such as --partition=gpu (repeatable)")
	f.StringArrayVar(&o.Set, "set", nil, "override a key of all cells: `key.path=value` (repeatable)")
	deviceFlags(f, &o.Options)
	f.Lookup("nproc").Usage = "processes of cells on a node where the grid has no nproc, `N` or auto"
	f.BoolVar(&o.Quiet, "quiet", false, "print the table and failures only")
	f.IntVar(&o.Share, "share", 0, "the part of the cells that a task of --slurm runs, from 1")
	f.BoolVar(&o.Gather, "gather", false, "write the results of the cells that have ended")
	f.MarkHidden("share")
	f.MarkHidden("gather")
	f.SortFlags = false
	o.NodeRank, o.LogLevel, o.Stdout, o.Stderr, o.Version = -1, "info", stdout, os.Stderr, versionString()
	return c
}
