package main

import (
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/cprun/cprun/internal/lab/command"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/run/bench"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

func benchCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "bench attention|comm|train|ops|calibrate",
		Short: "measure attention, transfers, steps or operations",
		Long: `Prints medians of the slowest rank, by the device's own clock. Without sizes, it picks some that the device
does in a few seconds.`,
		Example: "  cprun bench attention --nproc 4 --seq 32K,128K,512K\n  cprun bench comm --nproc 4 --json " +
			"comm.json\n  cprun bench train --nproc 4 examples/bench/llama-3.2-3b-128k.yaml",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("%s needs one of attention, comm, train, ops or calibrate", c.CommandPath())
			}
			return usagef("%s %q: want attention, comm, train, ops or calibrate", c.CommandPath(), args[0])
		},
	}
	c.AddCommand(benchAttentionCommand(), benchCommCommand(), benchTrainCommand(), benchOpsCommand(),
		benchCalibrateCommand())
	return c
}

func benchFlags(f *pflag.FlagSet, o *command.BenchOptions) {
	f.StringVar(&o.JSON, "json", "", "`file` for the report; -: standard output, without the tables")
	runFlags(f, &o.Options, "print the tables and failures only")
	o.Command = os.Args[1:]
}

// sizesVar defines a flag of sizes such as 32K, with commas between.
func sizesVar(f *pflag.FlagSet, p *[]int, name, usage string) {
	f.Func(name, usage, func(text string) error {
		var out []int
		for word := range strings.SplitSeq(text, ",") {
			n, err := config.ParseSize(strings.TrimSpace(word))
			if err != nil {
				return err
			}
			out = append(out, int(n))
		}
		*p = out
		return nil
	})
}

func ulyssesVar(f *pflag.FlagSet, n *int) {
	f.IntVar(n, "ulysses-degree", 0, "with hierarchical: ranks that exchange heads; 0: auto")
}

func benchAttentionCommand() *cobra.Command {
	o, s := command.BenchOptions{}, &bench.AttentionSpec{}
	c := &cobra.Command{
		Use:   "attention",
		Short: "attention over the ranks on random data, and its hops",
		Example: "  cprun bench attention --nproc 4 --seq 32K,128K,512K\n" +
			"  cprun bench attention --nproc 4 --seq 128K --algorithm ring,allgather --backend flash " +
			"--deterministic\n" +
			"  cprun bench attention --nproc 8 --documents magi --layout document,document-zigzag --algorithm " +
			"ring,allgather --iters 20",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return finish(command.Bench(c.Context(), bench.Task{Attention: s}, o))
		},
	}
	f := c.Flags()
	sizesVar(f, &s.Seq, "seq", "global tokens, `N,N,...` (default 32K,128K,512K, and 512,1K on a CPU)")
	f.IntVar(&s.Heads, "heads", 0, "query heads (default 32, and 4 on a CPU)")
	f.IntVar(&s.KVHeads, "kv-heads", 0, "key and value heads (default --heads if given, else 8, and 2 on a CPU)")
	f.IntVar(&s.HeadDim, "head-dim", 0, "head dimension (default 128, and 32 on a CPU)")
	f.BoolVar(&s.Causal, "causal", true, "causal mask; --causal=false: full attention")
	f.IntVar(&s.Window, "window", -1, "keys before its own that a query sees; -1: all")
	f.StringSliceVar(&s.Layouts, "layout", nil, "`NAME,...` of "+strings.Join(partition.Names, ", ")+", or auto (default "+
		"zigzag, and document with --documents)")
	f.StringVar(&s.Documents, "documents", "",
		"packed documents: magi (MagiAttention's), or a JSON `FILE` of lists of lengths")
	f.IntVar(&s.PackCount, "packs", 20, "maximum number of packs of documents, each of 3 iterations by default")
	f.StringSliceVar(&s.Algorithms, "algorithm", []string{"ring"}, "`NAME,...` of "+strings.Join(ring.Algorithms,
		", ")+", or auto")
	ulyssesVar(f, &s.Inner)
	f.IntVar(&s.GatherHeads, "gather-heads", 0, "with allgather: key and value heads per gather; 0: all")
	f.StringSliceVar(&s.Gathers, "gather", []string{ring.Auto},
		"with allgather and windows: when remote rows are sent, `NAME,...` of "+strings.Join(ring.Gathers, ", "))
	f.StringVar(&s.Backend, "backend", "auto", "fused, flash, reference or auto")
	f.StringVar(&s.DType, "dtype", "auto",
		"data type: bf16, fp16, fp32, on a CPU also fp64, or auto (bf16, on a CPU fp32)")
	f.BoolVar(&s.Deterministic, "deterministic", false, "same bits on every run")
	f.Float64Var(&s.Seconds, "seconds", 0,
		"minimum seconds per figure, after half as many of warm-up; of all packs, without; 0: use --iters")
	f.BoolVar(&s.Quick, "quick", false, "time the passes only, without hops and baselines")
	itersFlags(f, &s.Iters, &s.Warmup)
	benchFlags(f, &o)
	return c
}

func itersFlags(f *pflag.FlagSet, iters, warmup *int) {
	f.IntVar(iters, "iters", 0, "measured iterations; 0: for two seconds, at least 3")
	f.IntVar(warmup, "warmup", 2, "iterations before the measured ones")
}

func benchCommCommand() *cobra.Command {
	o, s := command.BenchOptions{}, &bench.CommSpec{}
	c := &cobra.Command{
		Use:     "comm",
		Short:   "ring exchange and collectives, on every transport",
		Example: "  cprun bench comm --nproc 4 --sizes 16M,64M,256M --calls exchange",
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return finish(command.Bench(c.Context(), bench.Task{Comm: s}, o))
		},
	}
	f := c.Flags()
	sizesVar(f, &s.Sizes, "sizes", "bytes, `N,N,...` (default 64K to 256M, and 4K to 1M on a CPU)")
	f.StringSliceVar(&s.Calls, "calls", bench.Calls, "operations to measure, `NAME,...`")
	itersFlags(f, &s.Iters, &s.Warmup)
	benchFlags(f, &o)
	return c
}

func benchTrainCommand() *cobra.Command {
	o := command.BenchTrainOptions{}
	c := &cobra.Command{
		Use:   "train train.yaml",
		Short: "training steps of a config, without checkpoints",
		Example: "  cprun bench train --nproc 4 examples/bench/llama-3.2-3b-128k.yaml\n  cprun bench train --nproc 4 " +
			"--steps 10 --set data.seq_len=64K examples/bench/llama-3.2-3b-128k.yaml",
		Args: oneArg("a config"),
		RunE: func(c *cobra.Command, args []string) error {
			return finish(command.BenchTrain(c.Context(), args[0], o))
		},
	}
	f := c.Flags()
	f.IntVar(&o.Steps, "steps", 8, "measured steps")
	f.IntVar(&o.Warmup, "warmup", 2, "steps before the measured ones")
	f.StringVar(&o.Data, "data", "random", "random (tokens) or config (the config's own data)")
	f.StringVar(&o.Trace, "trace", "", "`file` for a trace of the first steps (Chrome, Perfetto)")
	f.StringArrayVar(&o.Set, "set", nil, "override a key of the config: `key.path=value` (repeatable)")
	benchFlags(f, &o.BenchOptions)
	return c
}

func benchOpsCommand() *cobra.Command {
	o := command.BenchOptions{}
	c := &cobra.Command{
		Use:     "ops",
		Short:   "single operations of a step, and the device's peaks",
		Example: "  cprun bench ops --json ops.json",
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return finish(command.Bench(c.Context(), bench.Task{}, o))
		},
	}
	benchFlags(c.Flags(), &o)
	return c
}

func benchCalibrateCommand() *cobra.Command {
	o := command.BenchOptions{}
	c := &cobra.Command{
		Use:   "calibrate",
		Short: "measure this machine for cprun plan",
		Long: `Measures the cost table that cprun plan uses, in about a minute (GPUs: four), and stores it in the user's
cache; see docs/planner.md. On a CPU it measures 1 rank, one per core and twice as many, unless --nproc is given; on
GPUs one rank on each.`,
		Example: "  cprun bench calibrate\n  cprun bench calibrate --nproc 2 --json table.json",
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return finish(command.Calibrate(c.Context(), o))
		},
	}
	benchFlags(c.Flags(), &o)
	return c
}
