package main

import (
	"cmp"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/cprun/cprun/internal/lab/command"
	"github.com/cprun/cprun/internal/lab/scale"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/run/attend"
	"github.com/cprun/cprun/internal/run/worker"
	"github.com/cprun/cprun/ring"
)

func rootCommand() *cobra.Command {
	o, verify := command.TrainOptions{}, false
	root := &cobra.Command{
		Use:   "cprun [flags] train.yaml",
		Short: "context-parallel transformer training",
		Long: `Trains transformers on sequences too long for one device. It starts one process per device, splits every
sequence over them, and overlaps the ring's transfers with the attention kernels.`,
		Example: `  cprun --nproc 4 examples/opticks.yaml
  cprun --nproc 4 --run-dir runs/a --set train.steps=500 examples/opticks.yaml
  cprun plan examples/opticks.yaml --nproc 8`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("the config is missing: cprun [flags] train.yaml")
			}
			if err := cmp.Or(strayKey(args), knownConfig(c, args[0])); err != nil || len(args) == 1 {
				return err
			}
			return usagef("cprun takes one config, got %q", args)
		},
		Version:       versionString(),
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(c *cobra.Command, args []string) error {
			o.Args = os.Args
			if verify && !o.DryRun {
				v := command.VerifyOptions{Options: o.Options, Set: o.Set}
				code, err := command.Verify(c.Context(), args[0], v)
				if code == launch.ExitInterrupted { // before the first step: a batch system may start it again
					code = launch.ExitStopped
				}
				if err := finish(code, err); err != nil {
					return err
				}
			}
			return finish(command.Train(c.Context(), args[0], o))
		},
	}
	root.SetFlagErrorFunc(flagError)
	root.SetHelpCommand(helpCommand())
	helpTemplates(root)
	nodeFlags(root.Flags(), &o.Options)
	root.Flags().StringArrayVar(&o.Set, "set", nil, "override a key of the config: `key.path=value` (repeatable)")
	root.Flags().StringVar(&o.RunDir, "run-dir", "", "`directory` of the run (default runs/<name>-<time>)")
	root.Flags().StringVar(&o.Resume, "resume", "auto", "auto: the newest checkpoint of the run directory; never; or "+
		"the `path` of a checkpoint or run, to start a new run directory from")
	root.Flags().BoolVar(&verify, "verify", false, "first run cprun verify; train if the run is right")
	root.Flags().BoolVar(&o.DryRun, "dry-run", false, "check the input and print what would run; start nothing")
	root.Flags().BoolVar(&o.NoSave, "no-checkpoint", false, "write no checkpoint, as for measurements")
	root.Flags().MarkHidden("no-checkpoint")
	root.AddCommand(planCommand(), initCommand(), configCommand(), attentionCommand(), benchCommand(), scaleCommand(),
		exportCommand(), evalCommand(), verifyCommand(), generateCommand(), tokenizeCommand(), reportCommand(),
		topCommand(), doctorCommand(), versionCommand(), workerCommand())
	completes(root)
	return root
}

// nodeFlags defines the flags of training, the one command that runs on several nodes.
func nodeFlags(f *pflag.FlagSet, o *command.Options) {
	runFlags(f, o, "print failures only")
	f.StringVar(&o.NNodes, "nnodes", "",
		"number of nodes, `N` or MIN:MAX (default: from srun, torchrun or mpirun, else 1)")
	f.IntVar(&o.NodeRank, "node-rank", -1, "rank of this node (default: in order of arrival)")
	f.Lookup("node-rank").DefValue = "0" // as pflag shows none for it
	f.StringVar(&o.Rendezvous, "rendezvous", "", "`host:port` of the first node, where all nodes meet")
	f.StringVar(&o.Interface, "interface", "", "`network` between the nodes: an interface, an address of this host, "+
		"or CIDR (default: the fastest towards the rendezvous)")
	f.IntVar(&o.MaxRestarts, "max-restarts", 0, "restarts from the newest checkpoint after a failure")
}

func runFlags(f *pflag.FlagSet, o *command.Options, quiet string) {
	deviceFlags(f, o)
	f.BoolVar(&o.Quiet, "quiet", false, quiet)
	f.StringVar(&o.LogLevel, "log-level", "info", "error, warn, info or debug (output of every rank)")
	f.SortFlags = false
}

// deviceFlags defines the flags of the machine, and sets the options that have no flag in some commands.
func deviceFlags(f *pflag.FlagSet, o *command.Options) {
	f.StringVar(&o.NProc, "nproc", "auto", "processes on this node, `N` or auto (one per GPU, or 1 on a CPU machine)")
	f.StringVar(&o.Device, "device", "auto", "auto, cpu or cuda")
	o.NodeRank, o.LogLevel, o.Stdout, o.Stderr, o.Version = -1, "info", stdout, os.Stderr, versionString()
}

func planCommand() *cobra.Command {
	o := command.PlanOptions{}
	c := &cobra.Command{
		Use:   "plan train.yaml",
		Short: "predict memory, speed and traffic; runs nothing",
		Example: "  cprun plan examples/opticks.yaml --nproc 8\n" +
			"  cprun plan examples/opticks.yaml --nproc 4 --set data.seq_len=128K --json\n" +
			"  cprun plan examples/opticks.yaml --assume gpu=h200,cudnn=9.19.0,gpus=8,hosts=16,net=50G\n" +
			"  cprun plan examples/opticks.yaml --assume gpu=h100,gpus=8 --longest\n" +
			"  cprun plan --model Qwen/Qwen3-8B --seq-len 1M --assume gpu=h200,gpus=8",
		Args: func(c *cobra.Command, args []string) error {
			if o.Model != "" && len(args) == 0 {
				return nil
			}
			return oneArg("a config")(c, args)
		},
		RunE: func(c *cobra.Command, args []string) error {
			return finish(command.Plan(strings.Join(args, ""), o))
		},
	}
	deviceFlags(c.Flags(), &o.Options)
	c.Flags().StringArrayVar(&o.Set, "set", nil, "override a key of the config: `key.path=value` (repeatable)")
	c.Flags().StringVar(&o.Model, "model", "", "plan for a Hugging Face `directory` or Hub id; its config.json is enough")
	c.Flags().StringVar(&o.SeqLen, "seq-len", "", "`tokens` of a sample, in place of data.seq_len")
	c.Flags().StringArrayVar(&o.Assume, "assume", nil, machine.AssumeHelp)
	c.Flags().BoolVar(&o.Longest, "longest", false, "plan for the longest sequence that fits (in steps of 1K tokens)")
	c.Flags().BoolVar(&o.JSON, "json", false, "print one JSON object")
	c.Flags().BoolVar(&o.Verbose, "verbose", false,
		"also print the config, the partition, the hops and the other backends")
	return c
}

func attentionCommand() *cobra.Command {
	o, spec, asJSON := command.Options{}, attend.Spec{}, false
	c := &cobra.Command{
		Use:   "attention --in case.safetensors --out result.safetensors",
		Short: "run attention over the ranks on tensors of a file",
		Long: `Runs one distributed attention, forward and backward. Reads q, k, v and dout from a safetensors file, with the
mask in its metadata, and writes out, lse, dq, dk and dv in float32. All tensors are in global order. docs/formats.md
lists the layouts and the metadata; cprun refuses everything else.`,
		Example: "  cprun attention --in attention/attentiontest/testdata/causal_gqa.safetensors --out " +
			"/tmp/result.safetensors --nproc 4 --layout zigzag",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return finish(command.Attention(c.Context(), spec, asJSON, o))
		},
	}
	f := c.Flags()
	f.StringVar(&spec.In, "in", "", "`file` with q, k, v and dout")
	f.StringVar(&spec.Out, "out", "", "`file` to write")
	f.StringVar((*string)(&spec.Layout), "layout", "auto",
		"zigzag, striped, contiguous, window, document, document-zigzag or auto")
	f.StringVar(&spec.Algorithm, "algorithm", "auto", strings.Join(ring.Algorithms, ", ")+" or auto")
	ulyssesVar(f, &spec.Inner)
	f.IntVar(&spec.GatherHeads, "gather-heads", 0, "with allgather: key and value heads per gather; 0: all")
	f.StringVar(&spec.Gather, "gather", ring.Auto, "with allgather and windows: when remote rows are sent; "+
		strings.Join(ring.Gathers, ", "))
	f.StringVar(&spec.Backend, "backend", "auto", "flash, reference, on a GPU fused, or auto")
	f.StringVar(&spec.DType, "dtype", "auto",
		"data type: bf16, fp16, fp32, on a CPU also fp64, or auto (bf16, on a CPU fp32)")
	f.BoolVar(&asJSON, "json", false, "print a JSON report")
	runFlags(f, &o, "print failures only")
	return c
}

func exportCommand() *cobra.Command {
	o := command.ExportOptions{}
	c := &cobra.Command{
		Use:     "export RUN --to DIR",
		Short:   "write a checkpoint as a Hugging Face directory",
		Example: "  cprun export runs/opticks-20261120-101500 --to opticks-hf --dtype bf16",
		Args:    oneArg("a run directory or a checkpoint"),
		RunE: func(c *cobra.Command, args []string) error {
			o.Stdout = stdout
			return finish(command.Export(c.Context(), args[0], o))
		},
	}
	c.Flags().StringVar(&o.To, "to", "", "`directory` to write")
	c.Flags().StringVar(&o.DType, "dtype", "auto", "fp32, bf16, fp16, or auto (as in model.from, else fp32)")
	c.Flags().Int64Var(&o.Step, "step", 0, "checkpoint of step `N`; 0: the newest")
	c.Flags().StringArrayVar(&o.Set, "set", nil, "override a path of the run's config: `model.from=DIR` (repeatable)")
	c.Flags().BoolVar(&o.Merge, "merge", false, "of a run with lora: the model with its adapters added, in place of the "+
		"adapter")
	return c
}

func evalCommand() *cobra.Command {
	o := command.EvalOptions{}
	c := &cobra.Command{
		Use:   "eval RUN|HF-DIR --data PATH | --logprobs FILE",
		Short: "loss and perplexity of a model on your data",
		Example: "  cprun eval runs/opticks-20261120-101500 --data examples/data/opticks-book-3.txt --nproc 4\n" +
			"  cprun eval ~/models/llama-3.2-1b --data book.txt --seq-len 128K --nproc 8",
		Args: oneArg("a run directory, a checkpoint or a Hugging Face directory"),
		RunE: func(c *cobra.Command, args []string) error {
			return finish(command.Eval(c.Context(), args[0], o))
		},
	}
	f := c.Flags()
	f.StringVar(&o.Data, "data", "", "`path` of the data, as in data.path")
	f.StringVar(&o.LogProbs, "logprobs", "", "print the log-probabilities of the tokens of each record of a .jsonl `file`")
	f.StringVar(&o.SeqLen, "seq-len", "", "`tokens` of a sample (default: the run's, else 4096)")
	f.IntVar(&o.Samples, "samples", 0, "the first `N` samples; 0: all")
	f.Int64Var(&o.Step, "step", 0, "checkpoint of step `N` of a run; 0: the newest")
	f.StringArrayVar(&o.Set, "set", nil, "override a key of the config: `key.path=value` (repeatable)")
	f.BoolVar(&o.JSON, "json", false, "print one JSON object")
	runFlags(f, &o.Options, "print results and failures only")
	return c
}

func verifyCommand() *cobra.Command {
	o := command.VerifyOptions{}
	c := &cobra.Command{
		Use:   "verify train.yaml",
		Short: "compare one rank with several on your own batch; trains nothing",
		Long: `Runs the first step of a config on one rank and on several, and compares losses and gradients, and both
batches with the records. Changes single tokens and checks that the logits change only where the masks allow. Exit
status: 0 right, 1 wrong, 2 nothing could be checked.`,
		Example: "  cprun verify examples/documents.yaml --nproc 4\n" +
			"  cprun verify train.yaml --nproc 8 --json verify.json",
		Args: oneArg("a config"),
		RunE: func(c *cobra.Command, args []string) error {
			return finish(command.Verify(c.Context(), args[0], o))
		},
	}
	f := c.Flags()
	f.StringArrayVar(&o.Set, "set", nil, "override a key of the config: `key.path=value` (repeatable)")
	f.StringVar(&o.JSON, "json", "", "`file` for the report as JSON")
	runFlags(f, &o.Options, "print the tables and failures only")
	f.Lookup("nproc").Usage = "processes to compare one with, `N` or auto (the config's, one per GPU, at least 2)"
	return c
}

func tokenizeCommand() *cobra.Command {
	o := command.TokenizeOptions{}
	c := &cobra.Command{
		Use:   "tokenize --tokenizer T --to OUT FILE…",
		Short: "turn text and .jsonl into token files",
		Long: `Writes OUT.bin and OUT.idx in Megatron's format, on all cores. Each record of a .jsonl ("text" or "input_ids")
and each other file becomes one document. The ids equal those of the Python library tokenizers with
add_special_tokens, without truncation.`,
		Example: "  cprun tokenize --tokenizer Llama-3.2-1B --to corpus texts/*.txt\n" +
			"  cprun tokenize --tokenizer tokenizer.json --eos=false --to corpus a.jsonl b.jsonl",
		Args: func(*cobra.Command, []string) error { return nil },
		RunE: func(c *cobra.Command, args []string) error {
			o.Stdout, o.Stderr = stdout, os.Stderr
			return finish(command.Tokenize(c.Context(), args, o))
		},
	}
	f := c.Flags()
	f.StringVar(&o.Tokenizer, "tokenizer", "", "a tokenizer.json or the `directory` of one, or bytes")
	f.StringVar(&o.To, "to", "", "write `OUT`.bin and OUT.idx")
	f.BoolVar(&o.EOS, "eos", true, "end each text with the model's EOS token")
	f.BoolVar(&o.Quiet, "quiet", false, "print failures only")
	f.SortFlags = false
	return c
}

func doctorCommand() *cobra.Command {
	verbose := false
	c := &cobra.Command{
		Use:     "doctor",
		Short:   "check this machine; a fix for each problem",
		Example: "  cprun doctor",
		Args:    noArgs,
		RunE: func(*cobra.Command, []string) error {
			return finish(command.Doctor(stdout, verbose))
		},
	}
	c.Flags().BoolVar(&verbose, "verbose", false, "also list unset variables and rejected backends")
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
			if len(args) == 0 {
				return usagef("%s is missing: %s", what, c.UseLine())
			}
			return cmp.Or(strayKey(args), usagef("%s takes one argument, %s, got %q", c.CommandPath(), what, args))
		}
		return nil
	}
}

func generateCommand() *cobra.Command {
	o, prompt := command.GenerateOptions{}, ""
	c := &cobra.Command{
		Use:   "generate RUN|HF-DIR --prompt TEXT | --chat FILE|TEXT",
		Short: "print text that a trained model writes",
		Long: `Writes only the text to standard output, on one device in float32. It ends at the model's end-of-text token,
after --max-tokens, or at the model's last position. Ctrl-C ends it with status 130.`,
		Example: "  cprun generate runs/opticks-20261120-101500 --prompt \"The Rays of Light\"\n  cprun generate " +
			"Llama-3.2-1B --prompt-file start.txt --max-tokens 400 --temperature 0\n  echo \"Let there be\" | cprun " +
			"generate Llama-3.2-1B --prompt - --seed 7 --quiet >text.txt\n  cprun generate Qwen3-0.6B --chat \"What is light?\"",
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
	f.StringVar(&prompt, "prompt", "", "`text` to continue; - reads it from standard input")
	f.StringVar(&o.PromptFile, "prompt-file", "", "`file` with the prompt; a final line break is dropped")
	f.StringVar(&o.Chat, "chat", "", "`message` to answer by the chat template, or a file with messages (JSON) or text")
	f.IntVar(&o.MaxTokens, "max-tokens", 200, "at most `N` new tokens")
	f.Float64Var(&o.Sampling.Temperature, "temperature", 0.8, "divisor of the logits; 0: always the likeliest token")
	f.Float64Var(&o.Sampling.TopP, "top-p", 0.95, "draw from the fewest tokens of this total probability")
	f.IntVar(&o.Sampling.TopK, "top-k", 0, "draw from the `N` likeliest tokens; 0: from all")
	f.Int64Var(&o.Sampling.Seed, "seed", 1, "seed of the draws")
	f.Int64Var(&o.Step, "step", 0, "checkpoint of step `N` of a run; 0: the newest")
	f.StringVar(&o.Tokenizer, "tokenizer", "",
		"a tokenizer.json or the `directory` of one, or bytes (default: the model's own)")
	f.StringArrayVar(&o.Set, "set", nil, "override a path of the run's config: `model.from=DIR` (repeatable)")
	f.StringVar(&o.Device, "device", "auto", "auto, cpu or cuda")
	f.BoolVar(&o.IgnoreEOS, "ignore-eos", false, "do not stop at an end-of-text token")
	f.BoolVar(&o.Echo, "echo", false, "also print the prompt")
	f.BoolVar(&o.Quiet, "quiet", false, "print no statistics and notes on standard error")
	f.SortFlags = false
	return c
}

func reportCommand() *cobra.Command {
	o := command.ReportOptions{}
	c := &cobra.Command{
		Use:   "report RUN…",
		Short: "make an HTML page of runs or an experiment",
		Long: `Writes one HTML page of run directories, laid over one another, or of the directory
(or results.json) of an experiment. The page names files that are missing or torn.`,
		Example: "  cprun report runs/opticks-20261120-101500\n  cprun report runs/a runs/b --out compare.html",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("%s takes the directories of runs, or of one experiment", c.CommandPath())
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			o.Stdout, o.Version = stdout, versionString()
			return finish(command.Report(args, o))
		},
	}
	c.Flags().StringVar(&o.Out, "out", "", "`file` to write (default report.html, in the run if it is one)")
	return c
}

func scaleCommand() *cobra.Command {
	o := scale.Options{}
	c := &cobra.Command{
		Use:   "scale experiment.yaml",
		Short: "run a grid of configs and compare the results",
		Long: `Runs every combination of a grid, such as lengths by ranks by algorithms, and writes results.csv, results.json
and report.html. Failures and out-of-memory are recorded as results. Repeat the command to resume.`,
		Example: "  cprun scale examples/scale/lengths.yaml\n" +
			"  cprun scale examples/scale/lengths.yaml --out runs/scaling --set train.steps=20\n" +
			"  cprun scale examples/scale/h200.yaml --plan --assume arch=sm90,cudnn=9.10.2,memory=141G\n" +
			"  cprun scale examples/scale/h200.yaml --slurm --out /shared/scaling --sbatch=--partition=gpu " +
			"--sbatch=--gpus-per-node=8",
		Args: oneArg("an experiment"),
		RunE: func(c *cobra.Command, args []string) error {
			o.Args = os.Args
			return finish(scale.Run(args[0], o))
		},
	}
	f := c.Flags()
	f.StringVar(&o.Out, "out", "", "`directory` of the experiment (default: the newest unfinished "+
		"runs/<name>-<time>, else a new one)")
	f.StringVar(&o.Resume, "resume", "auto", "auto: resume the directory; never: delete its results and start over")
	f.BoolVar(&o.PlanOnly, "plan", false, "predict every cell; run none")
	f.StringArrayVar(&o.Assume, "assume", nil, "with --plan: "+machine.AssumeHelp)
	f.BoolVar(&o.Slurm, "slurm", false, "submit the cells as a Slurm array, and a job that gathers the results")
	f.StringArrayVar(&o.Sbatch, "sbatch", nil,
		"with --slurm: `argument` for sbatch, such as --partition=gpu (repeatable)")
	f.StringArrayVar(&o.Set, "set", nil, "override a key of all cells: `key.path=value` (repeatable)")
	deviceFlags(f, &o.Options)
	f.Lookup("nproc").Usage = "processes on a node if the grid has no nproc, `N` or auto"
	f.BoolVar(&o.Quiet, "quiet", false, "print the table and failures only")
	f.IntVar(&o.Share, "share", 0, "share of the cells that a task of --slurm runs, from 1")
	f.BoolVar(&o.Gather, "gather", false, "write the results of the finished cells")
	f.MarkHidden("share")
	f.MarkHidden("gather")
	f.SortFlags = false
	return c
}

func topCommand() *cobra.Command {
	o := command.TopOptions{}
	c := &cobra.Command{
		Use:   "top [RUN]",
		Short: "show a run live in the terminal",
		Long: `Shows loss, speed, memory, the wait of each rank, and events. It only reads the run directory, so it works from
any host that shares it. It draws on a terminal until q or Ctrl-C, and elsewhere prints once. Default: the newest run in
runs/.`,
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
	c.Flags().BoolVar(&o.Once, "once", false, "print the present state and exit")
	return c
}
