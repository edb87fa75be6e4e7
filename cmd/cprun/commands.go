package main

import (
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/cprun/cprun/internal/lab/command"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/run/attend"
	"github.com/cprun/cprun/internal/run/worker"
	"github.com/cprun/cprun/ring"
)

func rootCommand() *cobra.Command {
	o := command.TrainOptions{}
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
			o.Args = os.Args
			return finish(command.Train(c.Context(), args[0], o))
		},
	}
	root.SetFlagErrorFunc(flagError)
	root.SetHelpCommand(helpCommand())
	nodeFlags(root.Flags(), &o.Options)
	root.Flags().StringArrayVar(&o.Set, "set", nil, "override a key of the config: `key.path=value` (repeatable)")
	root.Flags().StringVar(&o.RunDir, "run-dir", "", "`directory` of the run (default runs/<name>-<time>)")
	root.Flags().StringVar(&o.Resume, "resume", "auto", "auto: go on from the newest checkpoint of the run "+
		"directory; never; or the `path` of a checkpoint or run, for a run directory without checkpoints of its own")
	root.Flags().BoolVar(&o.DryRun, "dry-run", false,
		"check all that a start checks, say what it would do, and start nothing")
	root.Flags().BoolVar(&o.NoSave, "no-checkpoint", false,
		"write no checkpoint: the run is a measurement, as those of cprun scale are")
	root.Flags().MarkHidden("no-checkpoint")
	root.AddCommand(planCommand(), attentionCommand(), benchCommand(), scaleCommand(), exportCommand(), evalCommand(),
		generateCommand(), tokenizeCommand(), reportCommand(), topCommand(), doctorCommand(), versionCommand(),
		workerCommand())
	completes(root)
	return root
}

// nodeFlags defines the flags of training, the one command that runs on several nodes.
func nodeFlags(f *pflag.FlagSet, o *command.Options) {
	runFlags(f, o, "print failures only")
	f.StringVar(&o.NNodes, "nnodes", "",
		"number of nodes, `N` or MIN:MAX (default 1, or what srun, torchrun, mpirun have started)")
	f.IntVar(&o.NodeRank, "node-rank", -1, "rank of this node (default: as the nodes come)")
	f.Lookup("node-rank").DefValue = "0" // as pflag shows none for it
	f.StringVar(&o.Rendezvous, "rendezvous", "", "`host:port` where nodes meet: of the first of them")
	f.StringVar(&o.Interface, "interface", "", "`network` between the nodes: an interface, an address of this host, "+
		"or CIDR (default: that towards the rendezvous)")
	f.IntVar(&o.MaxRestarts, "max-restarts", 0, "restart from the newest checkpoint this often after a failure")
}

func runFlags(f *pflag.FlagSet, o *command.Options, quiet string) {
	deviceFlags(f, o)
	f.BoolVar(&o.Quiet, "quiet", false, quiet)
	f.StringVar(&o.LogLevel, "log-level", "info", "error, warn, info or debug (debug shows the output of every rank)")
	f.SortFlags = false
	o.NodeRank, o.Stdout, o.Stderr, o.Version = -1, stdout, os.Stderr, versionString()
}

func deviceFlags(f *pflag.FlagSet, o *command.Options) {
	f.StringVar(&o.NProc, "nproc", "auto", "processes on this node, `N` or auto: one per GPU, or 1 on a CPU machine")
	f.StringVar(&o.Device, "device", "auto", "auto, cpu or cuda")
}

func planCommand() *cobra.Command {
	o := command.PlanOptions{}
	c := &cobra.Command{
		Use:   "plan train.yaml",
		Short: "say what a run will do, without a device: partition, hops, backend, memory, bytes",
		Example: "  cprun plan examples/opticks.yaml --nproc 8\n" +
			"  cprun plan examples/opticks.yaml --nproc 4 --set data.seq_len=128K --json\n" +
			"  cprun plan examples/opticks.yaml --assume gpu=h200,cudnn=9.19.0,gpus=8,hosts=16,net=50G\n" +
			"  cprun plan examples/opticks.yaml --assume gpu=h100,gpus=8 --longest",
		Args: oneArg("a config"),
		RunE: func(c *cobra.Command, args []string) error {
			o.Stdout, o.Stderr, o.LogLevel, o.Version = stdout, os.Stderr, "info", versionString()
			return finish(command.Plan(args[0], o))
		},
	}
	deviceFlags(c.Flags(), &o.Options)
	c.Flags().StringArrayVar(&o.Set, "set", nil, "override a key of the config: `key.path=value` (repeatable)")
	c.Flags().StringArrayVar(&o.Assume, "assume", nil, machine.AssumeHelp)
	c.Flags().BoolVar(&o.Longest, "longest", false,
		"plan for the longest sequence that fits the memory, in steps of 1K tokens")
	c.Flags().BoolVar(&o.JSON, "json", false, "print one JSON object")
	c.Flags().BoolVar(&o.Verbose, "verbose", false,
		"print the config, the partition, the hops and the other backends too")
	return c
}

func attentionCommand() *cobra.Command {
	o, spec, asJSON := command.Options{}, attend.Spec{}, false
	c := &cobra.Command{
		Use:   "attention --in case.safetensors --out result.safetensors",
		Short: "run one distributed attention, forward and backward, on given tensors",
		Long: `Reads q, k, v and dout from a safetensors file in global order, with the mask in the
metadata, and writes out, lse, dq, dk and dv, float32, in global order. docs/formats.md
lists the layouts and the metadata; everything else is refused.`,
		Example: "  cprun attention --in attention/attentiontest/testdata/causal_gqa.safetensors --out " +
			"/tmp/result.safetensors --nproc 4 --layout zigzag",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return finish(command.Attention(c.Context(), spec, asJSON, o))
		},
	}
	f := c.Flags()
	f.StringVar(&spec.In, "in", "", "the `file` with q, k, v and dout")
	f.StringVar(&spec.Out, "out", "", "the `file` to write")
	f.StringVar((*string)(&spec.Layout), "layout", "auto", "zigzag, striped, contiguous, document, document-zigzag or auto")
	f.StringVar(&spec.Algorithm, "algorithm", "auto", strings.Join(ring.Algorithms, ", ")+" or auto")
	ulyssesVar(f, &spec.Inner)
	f.IntVar(&spec.GatherHeads, "gather-heads", 0,
		"with allgather: key and value heads that are gathered at a time; 0: all")
	f.StringVar(&spec.Gather, "gather", ring.Auto, "with allgather and in windows, when rows of other ranks travel: "+
		strings.Join(ring.Gathers, ", "))
	f.StringVar(&spec.Backend, "backend", "auto", "flash, reference, on a GPU fused, or auto")
	f.StringVar(&spec.DType, "dtype", "auto",
		"what is computed in: bf16, fp16, fp32, on a CPU also fp64, or auto: bf16, and fp32 on a CPU")
	f.BoolVar(&asJSON, "json", false, "print a JSON report")
	runFlags(f, &o, "print failures only")
	return c
}

func exportCommand() *cobra.Command {
	o := command.ExportOptions{}
	c := &cobra.Command{
		Use:     "export RUN --to DIR",
		Short:   "write a Hugging Face directory from a run's newest checkpoint, or that of a step",
		Example: "  cprun export runs/opticks-20261120-101500 --to opticks-hf --dtype bf16",
		Args:    oneArg("a run directory or a checkpoint"),
		RunE: func(c *cobra.Command, args []string) error {
			o.Stdout = stdout
			return finish(command.Export(c.Context(), args[0], o))
		},
	}
	c.Flags().StringVar(&o.To, "to", "", "the `directory` to write")
	c.Flags().StringVar(&o.DType, "dtype", "auto",
		"fp32, bf16, fp16, or auto: that of the model which training began with, else fp32")
	c.Flags().Int64Var(&o.Step, "step", 0, "the checkpoint of step `N`; 0: the newest")
	return c
}

func evalCommand() *cobra.Command {
	o := command.EvalOptions{}
	c := &cobra.Command{
		Use:   "eval RUN|HF-DIR --data PATH",
		Short: "loss and perplexity of a checkpoint or a Hugging Face model over data, by position",
		Example: "  cprun eval runs/opticks-20261120-101500 --data examples/data/opticks-book-3.txt --nproc 4\n" +
			"  cprun eval ~/models/llama-3.2-1b --data book.txt --seq-len 128K --nproc 8",
		Args: oneArg("a run directory, a checkpoint or a Hugging Face directory"),
		RunE: func(c *cobra.Command, args []string) error {
			return finish(command.Eval(c.Context(), args[0], o))
		},
	}
	f := c.Flags()
	f.StringVar(&o.Data, "data", "", "`path` of the data, as data.path has it")
	f.StringVar(&o.SeqLen, "seq-len", "", "`tokens` of a sample (default: the run's, else 4096)")
	f.IntVar(&o.Samples, "samples", 0, "the first `N` samples; 0: all")
	f.Int64Var(&o.Step, "step", 0, "the checkpoint of step `N` of a run; 0: the newest")
	f.StringArrayVar(&o.Set, "set", nil, "override a key of the config: `key.path=value` (repeatable)")
	f.BoolVar(&o.JSON, "json", false, "print one JSON object")
	runFlags(f, &o.Options, "print results and failures only")
	return c
}

func tokenizeCommand() *cobra.Command {
	o := command.TokenizeOptions{}
	c := &cobra.Command{
		Use:   "tokenize --tokenizer T --to OUT FILE…",
		Short: "turn text and .jsonl into token files, on all cores",
		Long: `Writes OUT.bin and OUT.idx, Megatron's pair: one document for each record of a .jsonl
("text" or "input_ids") and for each other file. Ids are those of the Python library
tokenizers with add_special_tokens, without truncation.`,
		Example: "  cprun tokenize --tokenizer Llama-3.2-1B --to corpus texts/*.txt\n" +
			"  cprun tokenize --tokenizer tokenizer.json --eos=false --to corpus a.jsonl b.jsonl",
		Args: func(*cobra.Command, []string) error { return nil },
		RunE: func(c *cobra.Command, args []string) error {
			o.Stdout, o.Stderr = os.Stdout, os.Stderr
			return finish(command.Tokenize(c.Context(), args, o))
		},
	}
	f := c.Flags()
	f.StringVar(&o.Tokenizer, "tokenizer", "", "a tokenizer.json or the `directory` of one, or bytes")
	f.StringVar(&o.To, "to", "", "`OUT`: OUT.bin and OUT.idx are written")
	f.BoolVar(&o.EOS, "eos", true, "end each text with the model's EOS, unless it already does")
	f.BoolVar(&o.Quiet, "quiet", false, "print failures only")
	f.SortFlags = false
	return c
}

func doctorCommand() *cobra.Command {
	verbose := false
	c := &cobra.Command{
		Use:     "doctor",
		Short:   "say what this machine has, and what would be a problem, each with its fix",
		Example: "  cprun doctor",
		Args:    noArgs,
		RunE: func(*cobra.Command, []string) error {
			return finish(command.Doctor(stdout, verbose))
		},
	}
	c.Flags().BoolVar(&verbose, "verbose", false,
		"list variables that are not set, and why other backends cannot run, too")
	return c
}

// workerCommand returns the command that cprun spawns; it is not for users.
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

func generateCommand() *cobra.Command {
	o, prompt := command.GenerateOptions{}, ""
	c := &cobra.Command{
		Use:   "generate RUN|HF-DIR --prompt TEXT",
		Short: "print text that the model of a run or of a Hugging Face directory writes",
		Long: `Writes the text, and nothing else, to standard output, on one device in float32. It ends
at the model's end-of-text token, after --max-tokens, or at the model's last position;
Ctrl-C ends it with status 130.`,
		Example: "  cprun generate runs/opticks-20261120-101500 --prompt \"The Rays of Light\"\n  cprun generate " +
			"Llama-3.2-1B --prompt-file start.txt --max-tokens 400 --temperature 0\n  echo \"Let there be\" | cprun " +
			"generate Llama-3.2-1B --prompt - --seed 7 --quiet >text.txt",
		Args: oneArg("a run directory, a checkpoint or a Hugging Face directory"),
		RunE: func(c *cobra.Command, args []string) error {
			if c.Flags().Changed("prompt") {
				o.Prompt = &prompt
			}
			o.Stdin, o.Stdout, o.Stderr = os.Stdin, os.Stdout, os.Stderr
			return finish(command.Generate(c.Context(), args[0], o))
		},
	}
	f := c.Flags()
	f.StringVar(&prompt, "prompt", "", "the `text` to go on from; - reads it from standard input")
	f.StringVar(&o.PromptFile, "prompt-file", "", "the `file` to go on from, without the line break at its end")
	f.IntVar(&o.MaxTokens, "max-tokens", 200, "at most `N` new tokens")
	f.Float64Var(&o.Sampling.Temperature, "temperature", 0.8,
		"what logits are divided by; 0: the likeliest token, always")
	f.Float64Var(&o.Sampling.TopP, "top-p", 0.95,
		"draw from the smallest set of tokens of this probability; 1: from all")
	f.IntVar(&o.Sampling.TopK, "top-k", 0, "draw from the `N` likeliest tokens; 0: from all")
	f.Int64Var(&o.Sampling.Seed, "seed", 1, "of the draws")
	f.Int64Var(&o.Step, "step", 0, "the checkpoint of step `N` of a run; 0: the newest")
	f.StringVar(&o.Tokenizer, "tokenizer", "",
		"a tokenizer.json or the `directory` of one, or bytes (default: the model's own)")
	f.StringVar(&o.Device, "device", "auto", "auto, cpu or cuda")
	f.BoolVar(&o.IgnoreEOS, "ignore-eos", false, "write on behind an end-of-text token")
	f.BoolVar(&o.Echo, "echo", false, "also print the prompt")
	f.BoolVar(&o.Quiet, "quiet", false, "no statistics and notes on standard error")
	f.SortFlags = false
	return c
}

func reportCommand() *cobra.Command {
	o := command.ReportOptions{}
	c := &cobra.Command{
		Use:   "report RUN…",
		Short: "draw one run or several, or an experiment: one HTML page that needs no network",
		Long: `Writes one HTML page of run directories, laid over one another, or of the directory
(or results.json) of an experiment. The page names files that are missing or torn.`,
		Example: "  cprun report runs/opticks-20261120-101500\n  cprun report runs/a runs/b --out compare.html",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("%s takes run directories, or that of an experiment", c.CommandPath())
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			o.Stdout, o.Version = stdout, versionString()
			return finish(command.Report(args, o))
		},
	}
	c.Flags().StringVar(&o.Out, "out", "", "the `file` to write (default report.html in the run; here for several)")
	return c
}

func scaleCommand() *cobra.Command {
	o := command.ScaleOptions{}
	c := &cobra.Command{
		Use:   "scale experiment.yaml",
		Short: "run a grid of configs, such as lengths by ranks by algorithms, to one report",
		Long: `Runs every cell of the grid as processes of its own, and writes results.csv, results.json
and report.html. A cell that fails is a result. Repeat the command to resume.`,
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

func topCommand() *cobra.Command {
	o := command.TopOptions{}
	c := &cobra.Command{
		Use:   "top [RUN]",
		Short: "show a run while it goes on: loss, speed, memory, what each rank waits for, events",
		Long: `Reads the run directory, also from another host that shares it, and changes nothing. It
draws on a terminal until q or Ctrl-C, and elsewhere prints once. Default: the newest
of runs/.`,
		Example: "  cprun top runs/opticks-20261120-101500\n  cprun top --once",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usagef("%s takes one run directory, got %q", c.CommandPath(), args)
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			dir := ""
			if len(args) > 0 {
				dir = args[0]
			}
			o.Stdout, o.Terminal = stdout, os.Stdout
			return finish(command.Top(c.Context(), dir, o))
		},
	}
	c.Flags().BoolVar(&o.Once, "once", false, "print what is known now, and end")
	return c
}
