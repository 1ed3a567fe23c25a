# Included by the Makefile; `make -f benchmarks/bench.mk TARGET` works as well.
RUN ?= python
.PHONY: bench test-neon test-avx512

# Needs `pip install ktforge[bench]`, 20 GB in BENCH_TMP and a quarter of an hour. Writes benchmarks/results.md.
BENCH_TMP ?= /tmp
bench:
	$(RUN) benchmarks/run.py --tmp $(BENCH_TMP)

# Debian: apt-get install gcc-aarch64-linux-gnu qemu-user
test-neon:
	CC=aarch64-linux-gnu-gcc sh native/test/build.sh neon $(abspath build/test-neon)
	qemu-aarch64 build/test-neon/compare 100 neon

# Debian: apt-get install libsimde-dev. A few rounds of this are part of the tests.
test-avx512:
	sh native/test/build.sh avx512 $(abspath build/test-avx512)
	build/test-avx512/compare 300 avx2 avx512
