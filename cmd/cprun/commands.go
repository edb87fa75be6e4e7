package main

import (
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/cprun/cprun/internal/agent"
	"github.com/cprun/cprun/internal/attend"
	"github.com/cprun/cprun/internal/backend"
	"github.com/cprun/cprun/internal/worker"
)

func rootCommand() *cobra.Command {
	o := agent.TrainOptions{}
	root := &cobra.Command{
		Use:   "cprun [flags] train.yaml",
		Short: "context-parallel transformer training",
		Long: `cprun trains transformers on sequences too long for one device: it starts one
process per device, spreads every sequence over them, and runs attention as a
ring whose transfers hide behind the kernels.`,
		Example: `  cprun --nproc 4 examples/opticks.yaml
  cprun --nproc 4 --run-dir runs/a --set train.steps=500 examples/opticks.yaml
  cprun plan examples/opticks.yaml --nproc 8`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("no config given: cprun [flags] train.yaml")
			}
			if err := knownConfig(c, args[0]); err != nil || len(args) == 1 {
				return err
			}
			return usagef("one config is wanted, got %q", args)
		},
		Version:       versionString(),
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(c *cobra.Command, args []string) error {
			return finish(agent.Train(c.Context(), args[0], o))
		},
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.SetFlagErrorFunc(flagError)
	root.SetHelpCommand(helpCommand())
	launchFlags(root.Flags(), &o.Options)
	root.Flags().StringArrayVar(&o.Set, "set", nil, "override a key of the config: `key.path=value` (repeatable)")
	root.Flags().StringVar(&o.RunDir, "run-dir", "", "`directory` of the run (default runs/<name>-<time>)")
	root.Flags().StringVar(&o.Resume, "resume", "auto", "auto: go on from the newest checkpoint of the run directory; never; or the `path` of a checkpoint or run, for a run directory without checkpoints of its own")
	root.AddCommand(planCommand(), attentionCommand(), benchCommand(), exportCommand(), doctorCommand(), versionCommand(), workerCommand())
	root.AddCommand(unbuiltCommand("scale"), unbuiltCommand("tokenize"))
	return root
}

// launchFlags are the flags of every command that spawns processes.
func launchFlags(f *pflag.FlagSet, o *agent.Options) {
	deviceFlags(f, o)
	f.StringVar(&o.NNodes, "nnodes", "1", "number of nodes, `N` or MIN:MAX")
	f.IntVar(&o.NodeRank, "node-rank", 0, "rank of this node")
	f.StringVar(&o.Rendezvous, "rendezvous", "", "`host:port` where nodes meet")
	f.IntVar(&o.MaxRestarts, "max-restarts", 0, "restart from the newest checkpoint this often after a failure")
	f.BoolVar(&o.Quiet, "quiet", false, "print failures only")
	f.StringVar(&o.LogLevel, "log-level", "info", "error, warn, info or debug (debug shows the output of every rank)")
	f.SortFlags = false
	o.Stdout, o.Stderr, o.Version = os.Stdout, os.Stderr, versionString()
}

func deviceFlags(f *pflag.FlagSet, o *agent.Options) {
	f.StringVar(&o.NProc, "nproc", "auto", "processes on this node, `N` or auto: one per GPU, or 1 on a CPU machine")
	f.StringVar(&o.Device, "device", "auto", "auto, cpu or cuda")
}

func planCommand() *cobra.Command {
	o := agent.PlanOptions{}
	c := &cobra.Command{
		Use:     "plan train.yaml",
		Short:   "say what a run will do, without a device: partition, hops, backend, memory, bytes",
		Example: "  cprun plan examples/opticks.yaml --nproc 8\n  cprun plan examples/opticks.yaml --nproc 4 --set data.seq_len=128K --json\n  cprun plan examples/opticks.yaml --assume arch=sm90,cudnn=9.10.2,gpus=8,memory=80G",
		Args:    oneArg("a config"),
		RunE: func(c *cobra.Command, args []string) error {
			o.Stdout, o.Stderr, o.NNodes, o.LogLevel = os.Stdout, os.Stderr, "1", "info"
			return finish(agent.Plan(args[0], o))
		},
	}
	deviceFlags(c.Flags(), &o.Options)
	c.Flags().StringArrayVar(&o.Set, "set", nil, "override a key of the config: `key.path=value` (repeatable)")
	c.Flags().StringArrayVar(&o.Assume, "assume", nil, backend.AssumeHelp)
	c.Flags().BoolVar(&o.JSON, "json", false, "print one JSON object")
	return c
}

func attentionCommand() *cobra.Command {
	o, spec, asJSON := agent.Options{}, attend.Spec{}, false
	c := &cobra.Command{
		Use:   "attention --in case.safetensors --out result.safetensors",
		Short: "run one distributed attention, forward and backward, on given tensors",
		Long: `Reads q, k, v and dout from a safetensors file in global order, with the mask in
the file's metadata (causal, window, docs, softcap, scale), spreads them over the
ranks, and writes out, lse, dq, dk and dv, float32, in global order. Metadata of
other names are not looked at, but names much like these are errors.`,
		Example: "  cprun attention --in attention/attentiontest/testdata/causal_gqa.safetensors --out /tmp/result.safetensors --nproc 4 --layout zigzag",
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return finish(agent.Attention(c.Context(), spec, asJSON, o))
		},
	}
	f := c.Flags()
	f.StringVar(&spec.In, "in", "", "the `file` with q, k, v and dout")
	f.StringVar(&spec.Out, "out", "", "the `file` to write")
	f.StringVar(&spec.Layout, "layout", "auto", "zigzag, striped, contiguous, document or auto")
	f.StringVar(&spec.Algorithm, "algorithm", "auto", "ring, allgather or auto")
	f.StringVar(&spec.Backend, "backend", "auto", "flash, reference, on a GPU fused, or auto")
	f.StringVar(&spec.DType, "dtype", "auto", "what is computed in: fp32, fp64 on a CPU, bf16, fp16, fp32 on a GPU, or auto")
	f.BoolVar(&asJSON, "json", false, "print a JSON report")
	launchFlags(f, &o)
	return c
}

func exportCommand() *cobra.Command {
	o := agent.ExportOptions{}
	c := &cobra.Command{
		Use:     "export RUN --to DIR",
		Short:   "write a Hugging Face directory from a run's newest checkpoint",
		Example: "  cprun export runs/opticks-20261120-101500 --to opticks-hf --dtype bf16",
		Args:    oneArg("a run directory or a checkpoint"),
		RunE: func(c *cobra.Command, args []string) error {
			o.Stdout = os.Stdout
			return finish(agent.Export(c.Context(), args[0], o))
		},
	}
	c.Flags().StringVar(&o.To, "to", "", "the `directory` to write")
	c.Flags().StringVar(&o.DType, "dtype", "fp32", "fp32, bf16 or fp16")
	return c
}

func doctorCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "doctor",
		Short:   "say what this machine has, and what would be a problem, each with its fix",
		Example: "  cprun doctor",
		Args:    noArgs,
		RunE: func(*cobra.Command, []string) error {
			return finish(agent.Doctor(os.Stdout))
		},
	}
}

// workerCommand is what cprun spawns; it is not for users.
func workerCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "worker ROLE",
		Hidden: true,
		Args:   oneArg("a role"),
		RunE: func(_ *cobra.Command, args []string) error {
			return finish(worker.Run(args[0], os.Exit), nil)
		},
	}
}

func oneArg(what string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) != 1 {
			return usagef("%s takes %s, got %q", c.CommandPath(), what, args)
		}
		return nil
	}
}
