//go:build cuda

#include "shim.h"

#include <dlfcn.h>

#include <array>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define NV_CUDNN_FRONTEND_DISABLE_LOGGING
#define CUDNN_FRONTEND_SKIP_JSON_LIB

// If both are installed, cudnn-frontend fails with the runtimes of CUDA 12 and 13. This shim shows it only the runtime
// for which this cuDNN was built.
static int cudart_major;

static void *open_library(const char *name, int flags) {
	static const std::string stem = "libcudart.so.";
	if (stem.compare(0, stem.size(), name, 0, stem.size()) == 0 && stem + std::to_string(cudart_major) != name)
		return nullptr;
	return dlopen(name, flags);
}

#define dlopen open_library
#include <cudnn_frontend.h>
#undef dlopen

namespace cudnn_frontend {
void *cudnn_dlhandle = nullptr;
}

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

namespace {

struct Plan {
	fe::graph::Graph graph;
	std::vector<int> used; // pointers in the order of their uids
};

// guard runs f and converts an exception to an error.
template <class F>
int guard(char *err, size_t n, F f) {
	try {
		f();
		return 0;
	} catch (const std::exception &e) {
		snprintf(err, n, "%s", e.what());
	} catch (...) {
		snprintf(err, n, "unknown C++ exception");
	}
	return 1;
}

std::string last() {
	std::string s = fe::detail::get_last_error_string_();
	return s.empty() ? s : ": " + s;
}

void check(fe::error_t e, const char *what) {
	if (e.is_bad()) throw std::runtime_error(std::string(what) + ": " + e.get_message() + last());
}

void check(cudnnStatus_t s, const char *what) {
	if (s != CUDNN_STATUS_SUCCESS)
		throw std::runtime_error(std::string(what) + ": " + fe::detail::get_error_string(s) + last());
}

// Uids begin at 1, since 0 means none in cudnn-frontend.
int64_t uid(int pointer) { return pointer + 1; }

class Builder {
  public:
	Builder(Plan &plan, const cprun_dnn_desc &d) : plan(plan), d(d), used(CPRUN_DNN_POINTERS) {
		auto type = d.half ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16;
		plan.graph.set_io_data_type(type)
			.set_intermediate_data_type(fe::DataType_t::FLOAT)
			.set_compute_data_type(fe::DataType_t::FLOAT);
	}

	void forward() {
		auto a = fe::graph::SDPA_attributes().set_name("sdpa").set_generate_stats(true);
		a.set_implementation(
			d.unified ? fe::AttentionImplementation_t::UNIFIED : fe::AttentionImplementation_t::COMPOSITE);
		options(a);
		auto [o, stats] = plan.graph.sdpa(input(CPRUN_DNN_Q), input(CPRUN_DNN_K), input(CPRUN_DNN_V), a);
		output(o, CPRUN_DNN_O);
		output(stats, CPRUN_DNN_STATS).set_data_type(fe::DataType_t::FLOAT);
	}

	void backward() {
		auto a = fe::graph::SDPA_backward_attributes().set_name("sdpa_backward");
		a.set_deterministic_algorithm(d.deterministic);
		if (ragged() && !d.loose) a.set_max_total_seq_len_q(d.total_q).set_max_total_seq_len_kv(d.total_kv);
		options(a);
		auto stats = input(CPRUN_DNN_STATS);
		stats->set_data_type(fe::DataType_t::FLOAT);
		auto [dq, dk, dv] = plan.graph.sdpa_backward(input(CPRUN_DNN_Q), input(CPRUN_DNN_K), input(CPRUN_DNN_V),
			input(CPRUN_DNN_O), input(CPRUN_DNN_DO), stats, a);
		output(dq, CPRUN_DNN_DQ);
		output(dk, CPRUN_DNN_DK);
		output(dv, CPRUN_DNN_DV);
	}

	int64_t finish(cudnnHandle_t handle) {
		auto &g = plan.graph;
		check(g.validate(), "validate");
		check(g.build_operation_graph(handle), "build_operation_graph");
		check(g.create_execution_plans({fe::HeurMode_t::A}), "create_execution_plans");
		check(g.check_support(), "check_support");
		check(g.build_plans(), "build_plans");
		for (int i = 0; i < CPRUN_DNN_POINTERS; i++) {
			if (used[i]) plan.used.push_back(i);
		}
		int64_t workspace = 0;
		check(g.get_workspace_size(workspace), "get_workspace_size");
		return workspace;
	}

  private:
	Plan &plan;
	const cprun_dnn_desc &d;
	std::vector<bool> used;

	bool ragged() const { return d.total_q > 0; }

	template <class A>
	void options(A &a) {
		a.set_attn_scale(d.scale);
		auto corner = d.bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT : fe::DiagonalAlignment_t::TOP_LEFT;
		a.set_diagonal_alignment(corner);
		if (d.left >= 0) a.set_diagonal_band_left_bound(static_cast<int>(d.left));
		if (d.right >= 0) a.set_diagonal_band_right_bound(static_cast<int>(d.right));
		if (ragged())
			a.set_padding_mask(true).set_seq_len_q(lengths(CPRUN_DNN_LEN_Q)).set_seq_len_kv(lengths(CPRUN_DNN_LEN_K));
	}

	// shape returns [batch, heads, seq, dim] of a tensor.
	std::vector<int64_t> shape(int t) const {
		switch (t) {
		case CPRUN_DNN_K: case CPRUN_DNN_DK: return {d.batch, d.kv_heads, d.kv, d.dim};
		case CPRUN_DNN_V: case CPRUN_DNN_DV: return {d.batch, d.kv_heads, d.kv, d.dim_v};
		case CPRUN_DNN_O: case CPRUN_DNN_DO: return {d.batch, d.heads, d.q, d.dim_v};
		case CPRUN_DNN_STATS: return {d.batch, d.heads, d.q, 1};
		}
		return {d.batch, d.heads, d.q, d.dim};
	}

	Tensor make(int pointer, std::vector<int64_t> dims, std::vector<int64_t> strides) {
		used[pointer] = true;
		return plan.graph.tensor(
			fe::graph::Tensor_attributes().set_uid(uid(pointer)).set_dim(dims).set_stride(strides));
	}

	Tensor lengths(int pointer) {
		auto t = make(pointer, {d.batch, 1, 1, 1}, {1, 1, 1, 1});
		t->set_data_type(fe::DataType_t::INT32);
		return t;
	}

	Tensor offsets(int t) {
		auto o = make(CPRUN_DNN_TENSORS + t, {d.batch + 1, 1, 1, 1}, {1, 1, 1, 1});
		o->set_data_type(fe::DataType_t::INT64);
		return o;
	}

	std::vector<int64_t> strides(int t) const { return {d.stride[t][0], d.stride[t][2], d.stride[t][1], 1}; }

	Tensor input(int t) {
		auto x = make(t, shape(t), strides(t));
		if (ragged()) x->set_ragged_offset(offsets(t));
		return x;
	}

	fe::graph::Tensor_attributes &output(const Tensor &x, int t) {
		used[t] = true;
		x->set_output(true).set_uid(uid(t)).set_dim(shape(t)).set_stride(strides(t));
		if (ragged()) x->set_ragged_offset(offsets(t));
		return *x;
	}
};

} // namespace

extern "C" int cprun_dnn_load(size_t *version, char *err, size_t n) {
	return guard(err, n, [&] {
		if (!fe::cudnn_dlhandle) {
			void *h = dlopen("libcudnn.so.9", RTLD_NOW);
			if (!h) throw std::runtime_error(dlerror());
			fe::cudnn_dlhandle = h;
			auto runtime = reinterpret_cast<decltype(&cudnnGetCudartVersion)>(dlsym(h, "cudnnGetCudartVersion"));
			if (!runtime) throw std::runtime_error("libcudnn.so.9 has no cudnnGetCudartVersion");
			cudart_major = static_cast<int>(runtime() / 1000);
		}
		*version = fe::detail::get_backend_version();
	});
}

extern "C" int cprun_dnn_open(void **handle, void *stream, char *err, size_t n) {
	return guard(err, n, [&] {
		cudnnHandle_t h;
		check(fe::detail::create_handle(&h), "cudnnCreate");
		*handle = h;
		check(fe::detail::set_stream(h, static_cast<cudaStream_t>(stream)), "cudnnSetStream");
	});
}

extern "C" int cprun_dnn_close(void *handle, char *err, size_t n) {
	return guard(
		err, n, [&] { check(fe::detail::destroy_handle(static_cast<cudnnHandle_t>(handle)), "cudnnDestroy"); });
}

extern "C" int cprun_dnn_build(
	void **plan, int64_t *workspace, void *handle, const cprun_dnn_desc *d, char *err, size_t n) {
	return guard(err, n, [&] {
		auto p = std::make_unique<Plan>();
		Builder b(*p, *d);
		d->backward ? b.backward() : b.forward();
		*workspace = b.finish(static_cast<cudnnHandle_t>(handle));
		*plan = p.release();
	});
}

extern "C" int cprun_dnn_execute(const void *plan, void *handle, const uint64_t pointers[CPRUN_DNN_POINTERS],
	uint64_t workspace, char *err, size_t n) {
	return guard(err, n, [&] {
		auto p = static_cast<const Plan *>(plan);
		std::array<void *, CPRUN_DNN_POINTERS> at;
		int count = 0;
		for (int i : p->used) at[count++] = reinterpret_cast<void *>(pointers[i]);
		check(
			p->graph.execute(static_cast<cudnnHandle_t>(handle), at.data(), count, reinterpret_cast<void *>(workspace)),
			"execute");
	});
}

extern "C" void cprun_dnn_free(void *plan) { delete static_cast<Plan *>(plan); }
