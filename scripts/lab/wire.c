/* A wire with a propagation delay and random loss, between two TAP devices in two network namespaces.
 *
 *     wire <namespace> <device> <namespace> <device> <delay, microseconds> <loss, millionths>
 *
 * For kernels without netem. One thread reads each end and one writes it: packets keep their order, and a packet that
 * finds the queue full is dropped, as a router's would be. Says "ready" once both devices are there, and ends with the
 * thread that started it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define QUEUE 16384      /* packets in flight: 100 Mbit/s for 0.5 s, many times over with offloading */
#define PACKET_MAX 70000 /* one offloaded packet is up to 64 kB and its header */

struct packet { char *bytes; ssize_t size; struct timespec due; };
struct direction {
    int from, to;
    unsigned head, tail;
    struct packet queue[QUEUE];
    pthread_mutex_t lock;
    pthread_cond_t filled;
};

static long delay_us, loss_ppm;
static struct direction directions[2];

static int open_tap(const char *namespace, const char *device) {
    char path[256];
    snprintf(path, sizeof path, "/var/run/netns/%s", namespace);
    int inside = open(path, O_RDONLY);
    if (inside < 0 || setns(inside, CLONE_NEWNET)) { perror(path); exit(1); }
    close(inside);
    int tap = open("/dev/net/tun", O_RDWR);
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    strncpy(request.ifr_name, device, IFNAMSIZ - 1);
    if (tap < 0 || ioctl(tap, TUNSETIFF, &request)) { perror("/dev/net/tun"); exit(1); }
    if (ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)) perror("offload");
    return tap;
}

static void *take(void *argument) {
    struct direction *d = argument;
    char *buffer = malloc(PACKET_MAX);
    unsigned seed = 7919u * (unsigned)d->from + 1;
    for (;;) {
        ssize_t size = read(d->from, buffer, PACKET_MAX);
        if (size <= 0) { usleep(1000); continue; } /* The device is not up yet. */
        if (loss_ppm && rand_r(&seed) % 1000000 < loss_ppm) continue;
        struct packet packet = {.bytes = malloc((size_t)size), .size = size};
        memcpy(packet.bytes, buffer, (size_t)size);
        clock_gettime(CLOCK_MONOTONIC, &packet.due);
        packet.due.tv_nsec += delay_us % 1000000 * 1000;
        packet.due.tv_sec += delay_us / 1000000 + packet.due.tv_nsec / 1000000000;
        packet.due.tv_nsec %= 1000000000;
        pthread_mutex_lock(&d->lock);
        if (d->tail - d->head < QUEUE) {
            d->queue[d->tail++ % QUEUE] = packet;
            pthread_cond_signal(&d->filled);
        } else {
            free(packet.bytes);
        }
        pthread_mutex_unlock(&d->lock);
    }
}

static void *give(void *argument) {
    struct direction *d = argument;
    for (;;) {
        pthread_mutex_lock(&d->lock);
        while (d->head == d->tail) pthread_cond_wait(&d->filled, &d->lock);
        struct packet packet = d->queue[d->head++ % QUEUE];
        pthread_mutex_unlock(&d->lock);
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &packet.due, NULL) == EINTR) {}
        if (write(d->to, packet.bytes, (size_t)packet.size) < 0) usleep(1); /* A device that is down drops it. */
        free(packet.bytes);
    }
}

int main(int count, char **arguments) {
    if (count != 7) { fprintf(stderr, "wire NAMESPACE DEVICE NAMESPACE DEVICE DELAY_US LOSS_PPM\n"); return 2; }
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* Whoever was killed leaves no wire behind. */
    delay_us = atol(arguments[5]);
    loss_ppm = atol(arguments[6]);
    int one = open_tap(arguments[1], arguments[2]), other = open_tap(arguments[3], arguments[4]);
    pthread_t threads[4];
    for (int i = 0; i < 2; i++) {
        directions[i].from = i ? other : one;
        directions[i].to = i ? one : other;
        pthread_mutex_init(&directions[i].lock, NULL);
        pthread_cond_init(&directions[i].filled, NULL);
        pthread_create(&threads[2 * i], NULL, take, &directions[i]);
        pthread_create(&threads[2 * i + 1], NULL, give, &directions[i]);
    }
    printf("ready\n");
    fflush(stdout);
    pthread_join(threads[0], NULL);
}
