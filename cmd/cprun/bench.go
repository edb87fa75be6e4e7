package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/cprun/cprun/internal/lab/command"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/run/bench"
	"github.com/cprun/cprun/internal/run/job"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

func benchCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "bench attention|comm|train|ops|calibrate",
		Short: "measure attention over the ranks, transfers, training steps, single operations, or all that a plan " +
			"reckons with",
		Long: `Figures are medians by the device's own clock, of the slowest rank. Where no sizes are
given, they are what the device does in some seconds.`,
		Example: "  cprun bench attention --nproc 4 --seq 32K,128K,512K\n  cprun bench comm --nproc 4 --json " +
			"comm.json\n  cprun bench train --nproc 4 examples/bench/llama-3.2-3b-128k.yaml",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("%s takes what to measure: attention, comm, train, ops or calibrate", c.CommandPath())
			}
			return usagef("%s %q: want attention, comm, train, ops or calibrate", c.CommandPath(), args[0])
		},
	}
	c.AddCommand(benchAttentionCommand(), benchCommCommand(), benchTrainCommand(), benchOpsCommand(),
		benchCalibrateCommand())
	return c
}

func benchFlags(f *pflag.FlagSet, o *command.BenchOptions) {
	f.StringVar(&o.JSON, "json", "", "`file` to write the report to; - is standard output, in place of the tables")
	runFlags(f, &o.Options, "print the tables and failures only")
	o.Command = os.Args[1:]
}

func sizesVar[T int | int64](f *pflag.FlagSet, p *[]T, name, usage string) {
	f.Var(&sizes[T]{p}, name, usage)
}

type sizes[T int | int64] struct{ list *[]T }

func (s *sizes[T]) Set(text string) error {
	var out []T
	for word := range strings.SplitSeq(text, ",") {
		n, err := config.ParseSize(strings.TrimSpace(word))
		if err != nil {
			return err
		}
		out = append(out, T(n))
	}
	*s.list = out
	return nil
}

func (s *sizes[T]) String() string {
	if s.list == nil || len(*s.list) == 0 {
		return ""
	}
	return strings.Trim(fmt.Sprint(*s.list), "[]")
}

func ulyssesVar(f *pflag.FlagSet, n *int) {
	f.IntVar(n, "ulysses-degree", 0,
		"with hierarchical: ranks that exchange heads; 0: by costs, else as many as divide the heads")
}

func (s *sizes[T]) Type() string { return "sizes" }

func benchAttentionCommand() *cobra.Command {
	o, s := command.BenchOptions{}, &bench.AttentionSpec{}
	c := &cobra.Command{
		Use:   "attention",
		Short: "attention over the ranks on random data, forward and backward, and its hops",
		Example: "  cprun bench attention --nproc 4 --seq 32K,128K,512K\n" +
			"  cprun bench attention --nproc 4 --seq 128K --algorithm ring,allgather --backend flash " +
			"--deterministic\n" +
			"  cprun bench attention --nproc 8 --documents magi --layout document,document-zigzag --algorithm " +
			"ring,allgather --iters 20",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return finish(command.Bench(c.Context(), job.Bench{Attention: s}, o))
		},
	}
	f := c.Flags()
	sizesVar(f, &s.Seq, "seq", "global tokens, `N,N,...` (default 32K,128K,512K, and 512,1K on a CPU)")
	f.IntVar(&s.Heads, "heads", 0, "query heads (default 32, and 4 on a CPU)")
	f.IntVar(&s.KVHeads, "kv-heads", 0, "key and value heads (default 8, and 2 on a CPU; as many as --heads where "+
		"that is given)")
	f.IntVar(&s.HeadDim, "head-dim", 0, "width of a head (default 128, and 32 on a CPU)")
	f.BoolVar(&s.Causal, "causal", true, "a query sees the keys up to its own position; --causal=false: all")
	f.IntVar(&s.Window, "window", -1, "a query sees that many keys before its own; -1: all")
	f.StringSliceVar(&s.Layouts, "layout", nil, strings.Join(partition.Names, ", ")+": `NAME,...`, or auto (default "+
		"zigzag, and document with --documents)")
	f.StringVar(&s.Documents, "documents", "",
		"packed documents: those of MagiAttention's benchmark (magi), or a JSON `FILE`, a list of lists of lengths")
	f.IntVar(&s.PackCount, "packs", 20, "packs of documents at most")
	f.StringSliceVar(&s.Algorithms, "algorithm", []string{"ring"}, strings.Join(ring.Algorithms,
		", ")+": `NAME,...`, or auto")
	ulyssesVar(f, &s.Inner)
	f.IntVar(&s.GatherHeads, "gather-heads", 0,
		"with allgather: key and value heads that are gathered at a time; 0: all")
	f.StringSliceVar(&s.Gathers, "gather", []string{ring.Auto},
		"with allgather and in windows, when rows of other ranks travel, `NAME,...`: "+strings.Join(ring.Gathers, ", "))
	f.StringVar(&s.Backend, "backend", "auto", "fused, flash, reference or auto")
	f.StringVar(&s.DType, "dtype", "auto", "bf16, fp16, fp32, on a CPU also fp64; auto: bf16, and fp32 on a CPU")
	f.BoolVar(&s.Deterministic, "deterministic", false, "the same bits every time")
	f.Float64Var(&s.Seconds, "seconds", 0, "seconds that each figure is measured for, at least; 0: --iters")
	itersFlags(f, &s.Iters, &s.Warmup)
	benchFlags(f, &o)
	return c
}

func itersFlags(f *pflag.FlagSet, iters, warmup *int) {
	f.IntVar(iters, "iters", 0, "measured iterations; 0: as many as take two seconds, at least 3")
	f.IntVar(warmup, "warmup", 2, "iterations before them")
}

func benchCommCommand() *cobra.Command {
	o, s := command.BenchOptions{}, &bench.CommSpec{}
	c := &cobra.Command{
		Use:     "comm",
		Short:   "a ring of neighbours, and collectives, over every transport",
		Example: "  cprun bench comm --nproc 4 --sizes 16M,64M,256M --calls exchange",
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return finish(command.Bench(c.Context(), job.Bench{Comm: s}, o))
		},
	}
	f := c.Flags()
	sizesVar(f, &s.Sizes, "sizes", "bytes, `N,N,...` (default 64K to 256M, and 4K to 1M on a CPU)")
	f.StringSliceVar(&s.Calls, "calls", bench.Calls, "what to measure, `NAME,...`")
	itersFlags(f, &s.Iters, &s.Warmup)
	benchFlags(f, &o)
	return c
}

func benchTrainCommand() *cobra.Command {
	o := command.BenchTrainOptions{}
	c := &cobra.Command{
		Use:   "train train.yaml",
		Short: "training steps of a config, on random tokens, without checkpoints",
		Example: "  cprun bench train --nproc 4 examples/bench/llama-3.2-3b-128k.yaml\n  cprun bench train --nproc 4 " +
			"--steps 10 --set data.seq_len=64K examples/bench/llama-3.2-3b-128k.yaml",
		Args: oneArg("a config"),
		RunE: func(c *cobra.Command, args []string) error {
			return finish(command.BenchTrain(c.Context(), args[0], o))
		},
	}
	f := c.Flags()
	f.IntVar(&o.Steps, "steps", 8, "measured steps")
	f.IntVar(&o.Warmup, "warmup", 2, "steps before them")
	f.StringVar(&o.Data, "data", "random", "random: random tokens; config: the config's own data")
	f.StringVar(&o.Trace, "trace", "", "`file` to write the trace of the first steps to (Chrome and Perfetto)")
	f.StringArrayVar(&o.Set, "set", nil, "override a key of the config: `key.path=value` (repeatable)")
	benchFlags(f, &o.BenchOptions)
	return c
}

func benchOpsCommand() *cobra.Command {
	o := command.BenchOptions{}
	c := &cobra.Command{
		Use:     "ops",
		Short:   "the operations of a training step one by one, beside the device's ceilings",
		Example: "  cprun bench ops --json ops.json",
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return finish(command.Bench(c.Context(), job.Bench{}, o))
		},
	}
	benchFlags(c.Flags(), &o)
	return c
}

func benchCalibrateCommand() *cobra.Command {
	o := command.BenchOptions{}
	c := &cobra.Command{
		Use:   "calibrate",
		Short: "measure the cost table that cprun plan reckons with, and keep it",
		Long: `Measures this machine for cprun plan, in a minute or less, and keeps the table in the
user's cache: see docs/planner.md. On a CPU it measures 1 rank, one for each core and
twice as many, unless --nproc is given; on GPUs one on each.`,
		Example: "  cprun bench calibrate\n  cprun bench calibrate --nproc 2 --json table.json",
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return finish(command.Calibrate(c.Context(), o))
		},
	}
	benchFlags(c.Flags(), &o)
	return c
}
